/**
 * Gives every kind of order through the dashboard of a running product, with things of its own.
 *
 *     TOUR_URL=… TOUR_USER=admin TOUR_PASSWORD=… node test/browser/orders.mjs
 *
 * TOUR_SOURCE   source of the version it adds (default: simulated://orders)
 *
 * It leaves a retired version, a suspended tenant and a deleted route behind; do not run it where
 * that matters.
 */
import { expect, goTo, inBrowser, logIn, pick, shot, TOUR_URL } from "./browser.mjs";

const tag = Date.now().toString(36);
const MODEL = `orders-${tag}`;
const TENANT = `tenant-${tag}`;
const ROUTE = `route-${tag}`;
const SOURCE = process.env.TOUR_SOURCE ?? "simulated://orders";

const press = (scope, name) => scope.getByRole("button", { name, exact: true }).click();

async function filled(page, title, fields, submit) {
  const box = page.getByRole("dialog", { name: title });
  await box.waitFor();
  for (const [label, value] of Object.entries(fields)) {
    await box.getByRole("textbox", { name: label }).fill(value);
  }
  await press(box, submit);
  await box.waitFor({ state: "detached" });
}

async function tenant(page) {
  await goTo(page, "Tenants");
  await press(page, "Create tenant");
  await filled(page, "Create tenant", { Name: TENANT }, "Create tenant");
  await page.getByRole("heading", { name: TENANT, level: 1 }).waitFor();
  await press(page, "Issue key");
  await filled(page, `Issue a key to ${TENANT}`, { Name: "orders" }, "Issue key");
  const secret = page.getByRole("dialog", { name: "Copy the key now" });
  const shown = await secret.getByLabel("API key").inputValue();
  expect(/^sk_[0-9a-f]{12}\./.test(shown), "the issued key's secret is not shown");
  await shot(page, "orders-secret");
  await press(secret, "I have stored it");
  await press(page, "Add budget");
  await filled(page, `New budget of ${TENANT}`, { Limit: "50000" }, "Save budget");
  await page.getByText("50,000 tokens a month").waitFor();
  await press(page, "Actions for orders");
  await page.getByRole("menuitem", { name: "Rotate secret" }).click();
  await filled(page, /Rotate the secret/, {}, "Make a new secret");
  await press(page.getByRole("dialog", { name: "Copy the key now" }), "I have stored it");
  await page.getByText(/Old secret until/).waitFor();
  await shot(page, "orders-keys");
  await press(page, "Actions for orders");
  await page.getByRole("menuitem", { name: "Revoke" }).click();
  await filled(page, /Revoke key/, {}, "Revoke key");
  await page.getByRole("table", { name: "API keys" }).getByText("revoked").waitFor();
  await press(page, "Suspend");
  await filled(page, `Suspend ${TENANT}`, { Reason: "orders" }, "Suspend tenant");
  await page.getByText("Suspended: orders").waitFor();
  await shot(page, "orders-tenant");
}

async function model(page) {
  await goTo(page, "Models");
  await press(page, "Register model");
  await filled(page, "Register model", { Name: MODEL }, "Register");
  await filled(page, `Add version to ${MODEL}`, { Source: SOURCE }, "Add version");
  const versions = page.getByRole("table", { name: "Versions" });
  await versions.getByText("1 / 1").waitFor({ timeout: 60_000 });
  await shot(page, "orders-model");
  await press(page, "Add alias");
  await filled(page, `Add alias of ${MODEL}`, { Alias: `${MODEL}-alias` }, "Add alias");
  await page.getByRole("button", { name: `Remove alias ${MODEL}-alias` }).click();
  await page.getByText(/^No alias/).waitFor();
}

async function route(page) {
  await goTo(page, "Routes");
  await page.getByRole("button", { name: "Create route" }).first().click();
  const box = page.getByRole("dialog", { name: "Create route" });
  await box.getByRole("textbox", { name: "Name" }).fill(ROUTE);
  for (const arm of ["a", "b"]) {
    await pick(box.getByRole("group", { name: `Arm ${arm}` }), page, /^Version/, `${MODEL}@v1`);
  }
  await shot(page, "orders-route");
  await press(box, "Create route");
  const card = page.getByRole("article", { name: `Route ${ROUTE}` });
  await card.waitFor();
  await press(card, "Edit");
  const edit = page.getByRole("dialog", { name: `Edit route ${ROUTE}` });
  await edit.getByLabel("Weight").first().fill("30");
  await press(edit, "Save route");
  await card.getByRole("img", { name: "Share of traffic: a 75.0 %, b 25.0 %" }).waitFor();
  await press(card, "Delete");
  await filled(page, `Delete route ${ROUTE}`, {}, "Delete route");
  await card.waitFor({ state: "detached" });
}

async function drain(page) {
  await goTo(page, "Fleet");
  const node = page.getByRole("article", { name: /^Node/ }).first();
  await press(node, "Drain");
  await filled(page, /^Drain/, { Reason: "orders" }, "Drain node");
  await node.getByText("draining", { exact: true }).waitFor();
  await node.getByText("Draining: orders").waitFor();
  await shot(page, "orders-drain");
  await press(node, "Undrain");
  await filled(page, /^Undrain/, {}, "Undrain node");
  await node.getByText("draining", { exact: true }).waitFor({ state: "detached" });
}

/** The suspension is taken back, which the log then shows. */
async function undo(page) {
  await page.goto(`${TOUR_URL}/events?stream=tenant-${TENANT}&type=TenantSuspended`);
  const events = page.getByRole("region", { name: "Events" });
  await events.getByRole("button").first().click();
  await press(page.getByRole("dialog", { name: /^Event/ }), "Undo …");
  const ask = page.getByRole("dialog", { name: /^Undo event/ });
  await ask.getByText("Resume tenant").waitFor();
  await shot(page, "orders-undo");
  await filled(page, /^Undo event/, { Reason: "orders" }, "Undo it");
  await page.goto(`${TOUR_URL}/events?stream=tenant-${TENANT}`);
  await events.getByRole("button").first().click();
  await page
    .getByRole("dialog", { name: /^Event/ })
    .getByText("Undoes")
    .waitFor();
  await shot(page, "orders-undone");
}

async function scaleAndRetire(page) {
  await goTo(page, "Models");
  await page.getByRole("link", { name: MODEL, exact: true }).click();
  await page.getByRole("table", { name: "Versions" }).getByRole("button", { name: "v1" }).click();
  await press(page.getByRole("dialog", { name: `${MODEL}@v1` }), "Scale");
  const title = `Scale ${MODEL}@v1`;
  await filled(page, title, { "Minimum replicas": "0" }, "Scale");
  await page.getByText("0 to 1 replica", { exact: true }).waitFor();
  await press(page.getByRole("dialog", { name: `${MODEL}@v1` }), "Set price");
  const box = page.getByRole("dialog", { name: `Price of ${MODEL}@v1` });
  await box.getByLabel(/^Prompt/).fill("0.15");
  await filled(
    page,
    `Price of ${MODEL}@v1`,
    { "Cached prompt": "0.075", Output: "0.60" },
    "Set price",
  );
  await page.getByText("0.15 prompt · 0.075 cached · 0.6 output").waitFor();
  await shot(page, "orders-version");
  await press(page.getByRole("dialog", { name: `${MODEL}@v1` }), "Retire");
  await filled(page, `Retire ${MODEL}@v1`, { Reason: "orders" }, "Retire version");
  await page
    .getByRole("dialog", { name: `${MODEL}@v1` })
    .getByText("retired")
    .waitFor();
}

await inBrowser("orders", async (page) => {
  await logIn(page);
  await tenant(page);
  await model(page);
  await route(page);
  await drain(page);
  await scaleAndRetire(page);
  await undo(page);
});
