/**
 * Drives the built dashboard in a real browser against a running product.
 *
 *     TOUR_URL=http://127.0.0.1:8000 TOUR_USER=admin TOUR_PASSWORD=… node test/browser/tour.mjs
 *
 * TOUR_MODEL      what the playground asks for (default: the first model offered)
 * TOUR_TENANT     the tenant it is billed to (default: the first one)
 * TOUR_OUT        folder for the screenshots (default: ./tour)
 * TOUR_CHROMIUM   the browser (default: /usr/bin/chromium)
 *
 * Exits 1 on the first failed expectation and names it; console errors and failed responses count.
 */
import { expect, expectNames, goTo, inBrowser, logIn, pick, shot, TOUR_URL } from "./browser.mjs";

const PAGES = [
  "Fleet",
  "Models",
  "Routes",
  "Tenants",
  "Decisions",
  "Events",
  "Audit",
  "Requests",
  "Usage",
  "Settings",
];
const PHONE = { width: 390, height: 844 };

async function visit(page, name) {
  await goTo(page, name);
  await page.locator("[aria-busy=true]").first().waitFor({ state: "detached" });
  await page.waitForTimeout(400);
  expect((await page.getByRole("alert").count()) === 0, `${name} shows an alert`);
  await expectNames(page, name);
  await shot(page, name.toLowerCase());
}

async function checkLive(page) {
  const badge = page.getByRole("status", { name: "Live connection" });
  await badge.getByText("live", { exact: true }).waitFor({ timeout: 10_000 });
  expect(/position \d/.test(await badge.textContent()), "the live badge names no position");
}

async function converse(page) {
  await goTo(page, "Playground");
  await page.getByLabel("Message").waitFor();
  if (process.env.TOUR_MODEL) await pick(page, page, "Model", process.env.TOUR_MODEL);
  if (process.env.TOUR_TENANT) await pick(page, page, "Billed to tenant", process.env.TOUR_TENANT);
  await page.getByLabel("Message").fill("Say in one sentence what a GPU is.");
  await page.getByRole("button", { name: "Send" }).click();
  const turn = page.getByRole("article", { name: "Turn 1" });
  await turn.getByText(/TTFT\s+[\d.]+ m?s/).waitFor({ timeout: 60_000 });
  await shot(page, "playground-streaming");
  await turn.getByRole("link", { name: "record" }).waitFor({ timeout: 60_000 });
  expect((await turn.getByRole("alert").count()) === 0, "the playground shows an error");
  await shot(page, "playground");
}

async function findWithPalette(page) {
  await page.keyboard.press("Control+k");
  await page.getByRole("textbox", { name: "Search" }).fill("tenants");
  await page.waitForTimeout(400);
  await shot(page, "palette");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Tenants", level: 1 }).waitFor();
}

/** Opens the first thing that `find` gives, if there is any, and looks at its details. */
async function openDetail(page, from, find, name) {
  await goTo(page, from);
  const thing = find(page).first();
  if (!(await thing.isVisible().catch(() => false))) return;
  await thing.click();
  await page.waitForTimeout(1_200);
  expect((await page.getByRole("alert").count()) === 0, `${name} shows an alert`);
  await expectNames(page, name);
  await shot(page, name);
  await page.keyboard.press("Escape");
  await page.waitForTimeout(300);
}

const inTable = (label) => (page) =>
  page.getByRole("table", { name: label }).locator("tbody a, tbody button");

async function openDetails(page) {
  const node = (where) => where.getByRole("article", { name: /^Node/ }).getByRole("button");
  await openDetail(page, "Fleet", node, "node");
  await openDetail(page, "Models", inTable("Models"), "model");
  await openDetail(page, "Tenants", inTable("Tenants"), "tenant");
  await openDetail(page, "Audit", inTable("Audit"), "audit-entry");
  await openDetail(page, "Requests", inTable("Requests"), "request");
  const event = (where) => where.getByRole("region", { name: "Events" }).getByRole("button");
  await openDetail(page, "Events", event, "event");
  const decision = (where) => where.getByRole("button", { name: /^Generation/ });
  await openDetail(page, "Decisions", decision, "decision");
}

/** Half of the log ago: every page says so and nothing can be changed there. */
async function inThePast(page) {
  await goTo(page, "Fleet");
  await page.getByRole("button", { name: "As of" }).click();
  await shot(page, "as-of");
  const field = page.getByLabel("Log position", { exact: true }).first();
  const head = Number((await field.inputValue()).replaceAll(/\D/g, ""));
  await field.fill(String(Math.floor(head / 2)));
  await field.press("Enter");
  const banner = page.getByRole("status", { name: "As of" });
  await banner.getByText(/As of position/).waitFor();
  for (const name of ["Fleet", "Models", "Routes", "Tenants", "Decisions", "Events"]) {
    await goTo(page, name);
    await page.waitForTimeout(500);
    expect((await page.getByRole("alert").count()) === 0, `${name} in the past shows an alert`);
    expect(/as_of=\d/.test(page.url()), `${name} forgot the moment`);
    const changes = page.getByRole("button", { name: /^(Create|Register|Drain|Edit|Delete)/ });
    expect((await changes.count()) === 0, `${name} in the past offers a change`);
    await shot(page, `past-${name.toLowerCase()}`);
  }
  await banner.getByRole("button", { name: "Back to live" }).click();
  await banner.waitFor({ state: "detached" });
}

async function inDark(page) {
  await page.emulateMedia({ colorScheme: "dark" });
  for (const name of ["Fleet", "Decisions", "Audit", "Playground"]) {
    await goTo(page, name);
    await page.waitForTimeout(1_500);
    await shot(page, `dark-${name.toLowerCase()}`);
  }
  await page.emulateMedia({ colorScheme: "light" });
}

/** No choice lies beyond a clipped edge. */
async function expectReachable(page, path) {
  const groups = page.getByRole("radiogroup").filter({ visible: true });
  const cut = await groups.evaluateAll((found) =>
    found.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel),
  );
  expect(cut.length === 0, `${path} clips ${cut.join(" ")} on a phone`);
}

/** Cut off, a price reads as another one: it is in view however long the names beside it are. */
async function expectWholePrices(page) {
  await page.goto(`${TOUR_URL}/usage?by=tenant`);
  const price = page.getByRole("table", { name: "Usage" }).getByRole("columnheader").last();
  await price.getByText(/^Price/).waitFor();
  await page.locator("td .mono").evaluateAll((found) => {
    for (const each of found) each.textContent = "a-long-name-".repeat(5);
  });
  const { x, width } = await price.boundingBox();
  const cell = page.getByRole("table", { name: "Usage" }).locator("tbody td:last-child").first();
  const clipped = await cell.evaluate((each) => each.scrollWidth > each.clientWidth);
  expect(x + width <= PHONE.width && !clipped, `prices end at ${x + width} of ${PHONE.width} px`);
  await shot(page, "phone-usage-long");
}

async function onPhone(page) {
  await page.setViewportSize(PHONE);
  for (const path of ["fleet", "models", "requests", "usage", "playground"]) {
    await page.goto(`${TOUR_URL}/${path}`);
    await page.getByRole("heading", { level: 1 }).waitFor();
    await page.waitForTimeout(800);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    expect(wide <= PHONE.width, `${path} is ${wide} px wide on a phone`);
    await expectReachable(page, path);
    await shot(page, `phone-${path}`);
  }
  await expectWholePrices(page);
}

await inBrowser("tour", async (page) => {
  await logIn(page);
  await checkLive(page);
  await page.waitForTimeout(2_500); // one telemetry report
  for (const name of PAGES) await visit(page, name);
  await openDetails(page);
  await inThePast(page);
  await converse(page);
  await findWithPalette(page);
  await inDark(page);
  await onPhone(page);
});
