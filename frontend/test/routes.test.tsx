import { fireEvent, screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { shareOf } from "@/api/routes";
import { dialog, open, press } from "./harness";

test("a share is a weight over the sum of weights, and never NaN", () => {
  const arms = [9, 1, 0].map((weight, index) => ({ name: `${index}`, version_id: "m@1", weight }));
  expect(arms.map((arm) => shareOf(arm, arms))).toEqual([0.9, 0.1, 0]);
  const none = [{ name: "a", version_id: "m@1", weight: Number.NaN }];
  expect(none.map((arm) => shareOf(arm, none))).toEqual([0]);
});

test("the form previews the split while weights are typed, and saves with If-Match", async () => {
  const { backend } = await open("/routes?edit=chat");
  const box = await dialog("Edit route chat");
  const weights = within(box).getAllByLabelText("Weight");
  fireEvent.change(weights[1] as HTMLElement, { target: { value: "30" } });
  within(box).getByRole("img", { name: "Share of traffic: a 75.0 %, b 25.0 %" });
  press("Save route", box);
  await screen.findByText("Route chat is saved");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.headers["if-match"]).toBe('"1"');
  expect(call?.body).toEqual({
    sticky: true,
    arms: [
      { name: "a", version_id: "smollm2@v1", weight: 90 },
      { name: "b", version_id: "smollm2@v2", weight: 30 },
    ],
  });
});

test("after a conflict the typed weights stay, and the second try uses the fresh ETag", async () => {
  const { backend } = await open("/routes?edit=chat");
  const box = await dialog("Edit route chat");
  backend.state.versions["routes/chat"] = 5;
  const weights = within(box).getAllByLabelText("Weight");
  fireEvent.change(weights[0] as HTMLElement, { target: { value: "50" } });
  press("Save route", box);
  await within(box).findByText("Changed meanwhile");
  press("Load the current state", box);
  await screen.findByRole("button", { name: "Save route" });
  expect((weights[0] as HTMLInputElement).value).toBe("50");
  await new Promise((done) => setTimeout(done, 50)); // the fresh ETag arrives
  press("Save route", box);
  await screen.findByText("Route chat is saved");
  expect(backend.state.routes[0].arms[0].weight).toBe(50);
});

test("deleting asks first", async () => {
  const { backend } = await open("/routes");
  const card = await screen.findByRole("article", { name: "Route chat" });
  press("Delete", card);
  await dialog("Delete route chat");
  expect(backend.state.routes).toHaveLength(1);
  press("Delete route");
  await screen.findByRole("heading", { name: "No route yet" });
});
