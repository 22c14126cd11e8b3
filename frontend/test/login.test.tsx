import { fireEvent, screen } from "@testing-library/react";
import { expect, test } from "vitest";
import { follow, safeNext } from "@/pages/login/LoginPage";
import { open, press } from "./harness";

function fill(username: string, password: string): void {
  fireEvent.change(screen.getByLabelText(/Username/), { target: { value: username } });
  fireEvent.change(screen.getByLabelText(/^Password/), { target: { value: password } });
  press("Sign in");
}

test("whoever is not signed in is asked to, and comes back to the page asked for", async () => {
  await open("/tenants", { signedIn: false });
  expect(screen.getByRole("heading", { name: "Sign in to Engine" })).toBeDefined();
  fill("admin", "correct horse");
  await screen.findByRole("heading", { name: "Tenants" });
  await screen.findByRole("link", { name: "acme" });
});

test("a wrong password is answered in the server's words", async () => {
  await open("/", { signedIn: false });
  fill("admin", "wrong");
  expect((await screen.findByRole("alert")).textContent).toContain(
    "User name or password is wrong.",
  );
});

test("a provider is offered where there is one, and its refusal is said in words", async () => {
  const method = { name: "Example ID", url: "/sso/oidc/login/" };
  await open("/login?error=oidc_no_role", {
    signedIn: false,
    prepare: (backend) => {
      backend.methods = [method];
    },
  });
  const link = await screen.findByRole("link", { name: "Example ID" });
  expect(link.getAttribute("href")).toBe(method.url);
  expect(screen.getByRole("alert").textContent).toContain("gives you no role here");
});

test("a session that ends sends the page to the login", async () => {
  const { backend } = await open("/routes");
  await screen.findByRole("article", { name: "Route chat" });
  backend.user = null;
  press("Edit");
  await screen.findByRole("heading", { name: "Sign in to Engine" });
});

test("signing out leads to the login", async () => {
  await open("/fleet");
  press("Account and theme");
  fireEvent.click(await screen.findByRole("menuitem", { name: "Sign out" }));
  await screen.findByRole("heading", { name: "Sign in to Engine" });
});

test("only a path of this site is followed after the login", () => {
  expect(safeNext("/events?type=NodeLost")).toBe("/events?type=NodeLost");
  for (const bad of ["//evil.test", "https://evil.test", "/\\evil.test", undefined]) {
    expect(safeNext(bad)).toBe("/fleet");
  }
});

test("who wanted the API reference is sent back to it, past the router", () => {
  const went: string[] = [];
  const go = (next: string) =>
    follow(
      next,
      (path) => went.push(`push ${path}`),
      (path) => went.push(`load ${path}`),
    );
  go("/api/docs");
  go("/apiary");
  expect(went).toEqual(["load /api/docs", "push /apiary"]);
});
