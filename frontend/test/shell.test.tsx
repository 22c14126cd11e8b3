import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { ProblemError, problemFrom } from "@/api/problem";
import { ago, bytes, millis, words } from "@/ui/format";
import { open } from "./harness";

const PAGES = ["Fleet", "Models", "Routes", "Tenants", "Decisions", "Events", "Requests"];

test("every page is one link of the navigation away and names itself", async () => {
  await open("/fleet");
  for (const name of [...PAGES, "Playground", "Settings"]) {
    fireEvent.click(screen.getByRole("link", { name }));
    await screen.findByRole("heading", { level: 1, name });
    await waitFor(() => expect(document.title).toBe(`${name} · Engine`));
  }
});

test("Ctrl K finds a node by its name and opens it", async () => {
  await open("/models");
  await screen.findByRole("link", { name: "smollm2" });
  fireEvent.keyDown(document.documentElement, { key: "k", ctrlKey: true });
  fireEvent.change(await screen.findByLabelText("Search", { selector: "input" }), {
    target: { value: "n2" },
  });
  fireEvent.click(await screen.findByRole("button", { name: /n2.*node/ }));
  await screen.findByRole("dialog", { name: "Node n2" });
  expect(window.location.pathname + window.location.search).toBe("/fleet?node=n2");
});

test("an unknown address says so, with the navigation to leave it", async () => {
  await open("/nowhere");
  screen.getByRole("heading", { name: "There is no such page" });
  within(screen.getByRole("navigation", { name: "Main" })).getByRole("link", { name: "Models" });
});

test("a failing list shows the problem with its code and asks again on demand", async () => {
  let broken = true;
  await open("/tenants", {
    prepare: (backend) => {
      const handle = backend.handle.bind(backend);
      backend.handle = (call) => {
        if (!broken || !call.path.endsWith("/tenants/")) return handle(call);
        const body = { title: "Not allowed", status: 403, code: "forbidden", detail: "No." };
        return { status: 403, headers: {}, body };
      };
    },
  });
  const alert = await screen.findByRole("alert");
  expect(alert.textContent).toContain("403 · forbidden");
  broken = false;
  fireEvent.click(screen.getByRole("button", { name: "Try again" }));
  await screen.findByRole("link", { name: "acme" });
});

test("a problem is readable whatever the body was", () => {
  const gateway = new ProblemError(problemFrom("<html>502</html>", 502));
  expect(gateway.status).toBe(502);
  expect(gateway.message).toBe("Request failed");
  const field = { pointer: "/spec/name", detail: "too long" };
  const refused = new ProblemError(problemFrom({ errors: [field], status: 400 }, 400));
  expect(refused.fieldError("name")).toBe("too long");
});

test("numbers and times read as people write them", () => {
  expect(bytes(1.5 * 2 ** 30)).toBe("1.5 GiB");
  expect(bytes(null)).toBe("–");
  expect(millis(1_234)).toBe("1.23 s");
  expect(ago(100, 100_000 + 90_000)).toBe("1 min ago");
  expect(words("NodeDrainStarted")).toBe("Node drain started");
});
