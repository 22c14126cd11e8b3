import { fireEvent, screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { scaling } from "@/pages/models/replicas";
import { dialog, open, press, type } from "./harness";

test("the table shows the worst state, and ready of desired replicas", async () => {
  await open("/models");
  const table = await screen.findByRole("table", { name: "Models" });
  const row = (await within(table).findByRole("link", { name: "big" })).closest("tr");
  expect(row?.textContent).toContain("unplaced");
  expect(row?.textContent).toContain("0 / 1");
});

test("under a status that is not ready is why, all of it on hover", async () => {
  const reason = "download_failed: pip fetched nothing";
  const failed = { status: "failed", reason, retry_at: Date.now() / 1000 + 60 };
  await open("/models", {
    prepare: ({ state }) => Object.assign(state.models[1].versions[0], failed),
  });
  const table = await screen.findByRole("table", { name: "Models" });
  const why = within(table).getByText(/^download_failed: pip fetched nothing\. Next try in/);
  expect(why.closest("tr")?.textContent).toContain("minilm");
  expect(why.title).toBe(why.textContent);
  within(table).getByText("No device has 80.0 GiB.");
  const ready = within(table).getByRole("link", { name: "smollm2" }).closest("tr");
  expect(
    within(ready as HTMLElement)
      .getByText("ready")
      .closest("td")?.textContent,
  ).toBe("ready");
});

test("a model that is not there is offered nothing to do with", async () => {
  await open("/models/nope");
  await screen.findByText("Not found");
  expect(screen.queryByRole("link", { name: "Try it" })).toBeNull();
  expect(screen.queryByRole("button", { name: "Add version" })).toBeNull();
});

test("a model that is there can be tried, and given a version", async () => {
  await open("/models/smollm2");
  await screen.findByRole("button", { name: "Add version" });
  screen.getByRole("link", { name: "Try it" });
});

test("a registered model leads straight to adding its first version", async () => {
  const { backend } = await open("/models");
  press("Register model");
  await dialog("Register model");
  type(/^Name/, "mistral");
  press("Register");
  await dialog("Add version to mistral");
  type(/^Source/, "hf://mistralai/tiny@main");
  press("Add version", screen.getByRole("dialog"));
  await screen.findByRole("button", { name: "v1" });
  const spec = backend.state.models.at(-1).versions[0];
  expect(spec.source).toBe("hf://mistralai/tiny@main");
  expect(spec.gpu_memory).toBe(2 ** 30);
});

test("registering a name that exists says so and opens that model, adding nothing", async () => {
  await open("/models");
  press("Register model");
  await dialog("Register model");
  type(/^Name/, "smollm2");
  press("Register");
  await screen.findByText("smollm2 exists already");
  await screen.findByRole("heading", { name: "smollm2" });
  expect(screen.queryByText("Add version to smollm2")).toBeNull();
  expect(screen.queryByText("smollm2 is registered")).toBeNull();
});

test("a further version starts from the newest one, and says what the bare name means", async () => {
  const { backend } = await open("/models/smollm2?add=true");
  const box = await dialog("Add version to smollm2");
  within(box).getByText("smollm2 alone still means v1, until another version is made the default.");
  press("Add version", box);
  await screen.findByText("smollm2@v3 is added; it is placed next");
  const [newest, added] = backend.state.models[0].versions.slice(-2);
  expect(added.source).toBe(newest.source);
  expect(added.max_prompt_tokens).toBe(newest.max_prompt_tokens);
});

test("a draft model is asked for with draft speculation only, and sent with it", async () => {
  const { backend } = await open("/models/smollm2?add=true");
  const box = await dialog("Add version to smollm2");
  expect(within(box).queryByLabelText(/^Draft model/)).toBeNull();
  fireEvent.click(within(box).getByRole("combobox", { name: "Speculation" }));
  fireEvent.click(await screen.findByRole("option", { name: "draft", hidden: true }));
  type(/^Draft model/, "file:///models/small");
  press("Add version", box);
  await screen.findByText("smollm2@v3 is added; it is placed next");
  const added = backend.state.models[0].versions.at(-1);
  expect(added.speculation).toBe("draft");
  expect(added.draft_model).toBe("file:///models/small");
  expect(added.disaggregation).toBe("none");
});

test("the engine is chosen, sent, and shown with the version", async () => {
  const { backend } = await open("/models/smollm2?add=true");
  const box = await dialog("Add version to smollm2");
  fireEvent.click(within(box).getByRole("combobox", { name: "Engine" }));
  fireEvent.click(await screen.findByRole("option", { name: "vllm", hidden: true }));
  press("Add version", box);
  await screen.findByText("smollm2@v3 is added; it is placed next");
  expect(backend.state.models[0].versions.at(-1).engine).toBe("vllm");
});

test("an embedding model is asked for nothing that only generation has", async () => {
  const { backend } = await open("/models/smollm2?add=true");
  const box = await dialog("Add version to smollm2");
  expect(within(box).queryByLabelText(/^Inputs in a request/)).toBeNull();
  fireEvent.click(within(box).getByRole("combobox", { name: "Task" }));
  fireEvent.click(await screen.findByRole("option", { name: "embed", hidden: true }));
  expect(within(box).queryByRole("combobox", { name: "Speculation" })).toBeNull();
  expect(within(box).queryByLabelText(/^Output tokens/)).toBeNull();
  type(/^Inputs in a request/, "64");
  press("Add version", box);
  await screen.findByText("smollm2@v3 is added; it is placed next");
  const added = backend.state.models[0].versions.at(-1);
  expect([added.task, added.max_inputs, added.speculation]).toEqual(["embed", 64, "none"]);
});

test("a guarantee is asked for with high priority only, and sent with it", async () => {
  const { backend } = await open("/models/smollm2?add=true");
  const box = await dialog("Add version to smollm2");
  expect(within(box).queryByLabelText(/^Guaranteed part/)).toBeNull();
  fireEvent.click(within(box).getByRole("combobox", { name: "Priority" }));
  fireEvent.click(await screen.findByRole("option", { name: "high", hidden: true }));
  type(/^Guaranteed part/, "40");
  press("Add version", box);
  await screen.findByText("smollm2@v3 is added; it is placed next");
  const added = backend.state.models[0].versions.at(-1);
  expect(added.priority).toBe("high");
  expect(added.guaranteed_percent).toBe(40);
});

test("a refused name is shown with the server's rule, and the dialog stays", async () => {
  await open("/models");
  press("Register model");
  const box = await dialog("Register model");
  type(/^Name/, "No Spaces");
  press("Register");
  const alert = await within(box).findByRole("alert");
  expect(alert.textContent).toContain("A name is 1 to 63");
  expect(alert.textContent).toContain("invalid_name");
});

test("a version says how many replicas it keeps, or between which numbers", async () => {
  await open("/models/smollm2?version=v1", {
    prepare: ({ state }) => {
      Object.assign(state.models[0].versions[0], { min_replicas: 1, max_replicas: 1 });
    },
  });
  within(await dialog("smollm2@v1")).getByText("1 replica");
  expect(scaling(0, 4)).toBe("0 to 4 replicas");
});

test("scaling sends the version's new bounds with the model's ETag", async () => {
  const { backend } = await open("/models/smollm2?version=v1");
  await dialog("smollm2@v1");
  press("Scale");
  const box = await dialog("Scale smollm2@v1");
  type("Minimum replicas", "3", box);
  press("Scale", box);
  await screen.findByText("smollm2@v1 keeps 3 replicas");
  const call = backend.calls.findLast((each) => each.method === "POST");
  expect(call?.path).toBe("/api/v1/models/smollm2/versions/v1/scale/");
  expect(call?.headers["if-match"]).toBe('"1"');
  expect(call?.body).toEqual({ min_replicas: 3, max_replicas: 3 });
});

test("a price goes out as the text that was typed", async () => {
  const { backend } = await open("/models/smollm2?version=v1");
  await dialog("smollm2@v1");
  await screen.findByText("0.15 prompt · 0.075 cached · 0.6 output");
  press("Set price");
  const box = await dialog("Price of smollm2@v1");
  type(/^Output/, "0.700001", box);
  press("Set price", box);
  await screen.findByText("0.15 prompt · 0.075 cached · 0.700001 output");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.path).toBe("/api/v1/models/smollm2/versions/v1/price/");
  expect(call?.headers["if-match"]).toBe('"1"');
  expect(call?.body).toEqual({ input: "0.15", cached_input: "0.075", output: "0.700001" });
});

test("an edit that somebody overtook overwrites nothing and says so", async () => {
  const { backend } = await open("/models/smollm2?version=v2");
  await dialog("smollm2@v2");
  press("Retire");
  const box = await dialog("Retire smollm2@v2");
  backend.state.versions["models/smollm2"] = 7;
  press("Retire version", box);
  const alert = await within(box).findByRole("alert");
  expect(alert.textContent).toContain("Changed meanwhile");
  expect(backend.state.models[0].versions[1].retired).toBe(false);
  press("Load the current state", box);
  await screen.findByRole("button", { name: "Retire version" });
});

test("a version in use is not retired, and the dialog says what uses it", async () => {
  const { backend } = await open("/models/smollm2?version=v1");
  await dialog("smollm2@v1");
  press("Retire");
  const box = await dialog("Retire smollm2@v1");
  within(box).getByText(/While a route has an arm of it/);
  press("Retire version", box);
  const alert = await within(box).findByRole("alert");
  expect(alert.textContent).toContain("smollm2@v1 is the default of smollm2; make another");
  expect(backend.state.models[0].versions[0].retired).toBe(false);
});

test("aliases are added and removed", async () => {
  const { backend } = await open("/models/smollm2");
  press(await screen.findByText("Add alias").then(() => "Add alias"));
  await dialog("Add alias of smollm2");
  type(/^Alias/, "chatty");
  press("Add alias", screen.getByRole("dialog"));
  fireEvent.click(await screen.findByRole("button", { name: "Remove alias chatty" }));
  await screen.findByText("Alias chatty is removed");
  expect(backend.state.models[0].aliases).toEqual(["gpt-small"]);
});

test("what the load changed and what loading ahead was worth stand below the models", async () => {
  await open("/models");
  const scaled = await screen.findByRole("table", { name: "Scaled by load" });
  within(scaled).getByText("0 → 1");
  within(scaled).getByTitle("num_open 2");
  const ahead = await screen.findByRole("table", { name: "Loaded ahead" });
  within(ahead).getByText(/^75/);
  within(ahead).getByText("300 s");
});

test("a version whose source cannot be fetched says why, and when it is tried again", async () => {
  await open("/models/smollm2", {
    prepare: ({ state }) => {
      Object.assign(state.models[0].versions[0], {
        status: "failed",
        ready_replicas: 0,
        reason: "download_failed: no such package.",
        retry_at: Date.now() / 1000 + 75,
      });
    },
  });
  const table = await screen.findByRole("table", { name: "Versions" });
  const row = within(table).getByRole("button", { name: "v1" }).closest("tr");
  expect(row?.textContent).toMatch(/download_failed: no such package\. Next try in \d\d s\./);
});

test("a ready model says what its versions have to say, before one that is simply ready", async () => {
  const reason = "The replica on n1 has no other place, so the drain waits.";
  await open("/models", {
    prepare: ({ state }) => {
      const [model] = state.models;
      const ready = { ...model.versions[0], status: "ready", stuck_replicas: 0, reason: "" };
      model.versions = [ready, { ...ready, version: "v9", version_id: "smollm2@v9", reason }];
    },
  });
  const table = await screen.findByRole("table", { name: "Models" });
  const row = (await within(table).findByRole("link", { name: "smollm2" })).closest("tr");
  expect(row?.textContent).toContain(reason);
});

test("a model of which nothing moves is stuck, before anything else", async () => {
  await open("/models", {
    prepare: ({ state }) => {
      const stuck = { status: "loading", ready_replicas: 0, stuck_replicas: 1 };
      Object.assign(state.models[0].versions[0], stuck);
    },
  });
  const table = await screen.findByRole("table", { name: "Models" });
  const row = (await within(table).findByRole("link", { name: "smollm2" })).closest("tr");
  expect(row?.textContent).toContain("stuck");
});
