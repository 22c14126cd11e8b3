/** What jsdom lacks and a browser has. */
import { notifications } from "@mantine/notifications";
import { cleanup, configure } from "@testing-library/react";
import { afterEach, vi } from "vitest";

configure({ asyncUtilTimeout: 8_000 }); // a busy machine is slow, not wrong

Object.defineProperty(window, "matchMedia", {
  writable: true,
  value: (query: string) => ({
    matches: false,
    media: query,
    addEventListener: () => {},
    removeEventListener: () => {},
  }),
});

class NoResizeObserver {
  observe() {}
  unobserve() {}
  disconnect() {}
}

vi.stubGlobal("ResizeObserver", NoResizeObserver);
/* Nothing has a size in jsdom, and a virtual list shows what fits into its box. */
Object.defineProperties(Element.prototype, {
  clientHeight: { configurable: true, get: () => 700 },
  clientWidth: { configurable: true, get: () => 1200 },
});
window.scrollTo = () => {};
Element.prototype.scrollIntoView = () => {};
Object.defineProperty(document, "fonts", { value: new EventTarget() });

afterEach(() => {
  cleanup();
  notifications.clean();
  document.body.replaceChildren();
});
