/** What the browser scripts share: a watched page, the login, and expectations that name themselves. */
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";

export const {
  TOUR_URL = "http://127.0.0.1:8000",
  TOUR_USER = "admin",
  TOUR_PASSWORD,
  TOUR_OUT = "tour",
  TOUR_CHROMIUM = "/usr/bin/chromium",
} = process.env;

export const problems = [];

export function expect(condition, message) {
  if (!condition) throw new Error(message);
}

export const shot = (page, name) => page.screenshot({ path: join(TOUR_OUT, `${name}.png`) });

function watch(page) {
  page.on("console", (message) => {
    if (message.type() === "error") problems.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => problems.push(`page: ${error.message}`));
  page.on("response", (response) => {
    if (response.status() >= 500) problems.push(`${response.status()} ${response.url()}`);
  });
}

/** Before the login the question "who am I?" is answered 401, which is no problem. */
function forgetLoginProbe() {
  const kept = problems.filter((problem) => !problem.includes("401"));
  problems.splice(0, problems.length, ...kept);
}

export async function logIn(page) {
  await page.goto(TOUR_URL);
  await page.getByRole("heading", { name: "Sign in to Engine" }).waitFor();
  await shot(page, "login");
  await page.getByLabel(/^Username/).fill(TOUR_USER);
  await page.getByLabel(/^Password/).fill(TOUR_PASSWORD);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Fleet", level: 1 }).waitFor();
  forgetLoginProbe();
}

export async function goTo(page, name) {
  await page.getByRole("navigation").getByRole("link", { name, exact: true }).click();
  await page.getByRole("heading", { name, level: 1 }).waitFor();
}

/** Everything that can be pressed or followed says what it is. */
export async function expectNames(page, where) {
  const nameless = await page
    .locator("button:visible, a:visible")
    .evaluateAll((elements) =>
      elements
        .filter((each) => !each.ariaLabel && !each.textContent.trim() && !each.ariaHidden)
        .map((each) => each.outerHTML.slice(0, 200)),
    );
  expect(nameless.length === 0, `${where} has controls without a name: ${nameless.join(" ")}`);
}

export async function pick(scope, page, label, value) {
  await scope.getByLabel(label, { exact: true }).and(scope.locator("input")).click();
  await page.getByRole("option", { name: value, exact: true }).first().click();
}

/** Run `steps` on one desktop page; exit code 1 and a screenshot if an expectation fails. */
export async function inBrowser(name, steps) {
  mkdirSync(TOUR_OUT, { recursive: true });
  const browser = await chromium.launch({
    executablePath: TOUR_CHROMIUM,
    args: ["--no-sandbox", "--disable-background-networking", "--disable-component-update"],
  });
  const page = await browser.newPage({
    viewport: { width: 1440, height: 900 },
    colorScheme: "light",
  });
  try {
    watch(page);
    await steps(page);
    expect(problems.length === 0, problems.join("\n"));
    console.log(`${name}: no error; screenshots in ${TOUR_OUT}`);
  } catch (error) {
    await shot(page, `${name}-failed`);
    console.error(`${name} failed: ${error.message}`);
    process.exitCode = 1;
  } finally {
    await browser.close();
  }
}
