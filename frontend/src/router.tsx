/** The pages and what of their state lives in the URL. */
import type { QueryClient } from "@tanstack/react-query";
import {
  createRootRouteWithContext,
  createRoute,
  createRouter,
  lazyRouteComponent,
  Outlet,
  redirect,
  retainSearchParams,
} from "@tanstack/react-router";
import { z } from "zod";
import { sessionQuery } from "./api/session";
import { GROUPS } from "./api/usage";
import { LoginPage } from "./pages/login/LoginPage";
import { NotFound } from "./pages/NotFound";
import { Shell } from "./pages/shell/Shell";
import { PageError } from "./ui/PageError";

const text = z.coerce.string().optional().catch(undefined);
const flag = z.coerce.boolean().optional().catch(undefined);
const moment = z.union([z.number(), z.string()]).optional().catch(undefined);
const number = z.coerce.number().optional().catch(undefined);

const rootRoute = createRootRouteWithContext<{ queries: QueryClient }>()({
  component: Outlet,
  notFoundComponent: NotFound,
});

const loginRoute = createRoute({
  getParentRoute: () => rootRoute,
  path: "/login",
  validateSearch: z.object({ next: text, error: text }),
  component: LoginPage,
});

const appRoute = createRoute({
  getParentRoute: () => rootRoute,
  id: "app",
  component: Shell,
  validateSearch: z.object({ as_of: moment }),
  search: { middlewares: [retainSearchParams(["as_of"])] },
  beforeLoad: async ({ context, location }) => {
    const session = await context.queries.ensureQueryData(sessionQuery);
    if (session === null) throw redirect({ to: "/login", search: { next: location.href } });
  },
  errorComponent: PageError,
});

const indexRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/",
  beforeLoad: () => {
    throw redirect({ to: "/fleet" });
  },
});

const fleetRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/fleet",
  validateSearch: z.object({ node: text }),
  component: lazyRouteComponent(() => import("./pages/fleet/FleetPage"), "FleetPage"),
});

const modelsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/models",
  validateSearch: z.object({ register: flag, q: text }),
  component: lazyRouteComponent(() => import("./pages/models/ModelsPage"), "ModelsPage"),
});

const modelRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/models/$name",
  validateSearch: z.object({ version: text, add: flag }),
  component: lazyRouteComponent(() => import("./pages/models/ModelPage"), "ModelPage"),
});

const routesRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/routes",
  validateSearch: z.object({ edit: text, create: flag }),
  component: lazyRouteComponent(() => import("./pages/routes/RoutesPage"), "RoutesPage"),
});

const tenantsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/tenants",
  validateSearch: z.object({ create: flag }),
  component: lazyRouteComponent(() => import("./pages/tenants/TenantsPage"), "TenantsPage"),
});

const tenantRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/tenants/$id",
  component: lazyRouteComponent(() => import("./pages/tenants/TenantPage"), "TenantPage"),
});

const decisionsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/decisions",
  validateSearch: z.object({ open: text }),
  component: lazyRouteComponent(() => import("./pages/decisions/DecisionsPage"), "DecisionsPage"),
});

const eventsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/events",
  validateSearch: z.object({ stream: text, type: text, actor: text, open: number }),
  component: lazyRouteComponent(() => import("./pages/events/EventsPage"), "EventsPage"),
});

const auditRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/audit",
  validateSearch: z.object({
    q: text,
    actor: text,
    target: text,
    outcome: z.enum(["done", "refused"]).optional().catch(undefined),
    open: number,
  }),
  component: lazyRouteComponent(() => import("./pages/audit/AuditPage"), "AuditPage"),
});

const requestsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/requests",
  validateSearch: z.object({
    request_id: text,
    tenant: text,
    model: text,
    outcome: text,
    open: text,
  }),
  component: lazyRouteComponent(() => import("./pages/requests/RequestsPage"), "RequestsPage"),
});

const usageRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/usage",
  validateSearch: z.object({
    by: z.enum(GROUPS).optional().catch(undefined),
    days: number,
    tenant: text,
  }),
  component: lazyRouteComponent(() => import("./pages/usage/UsagePage"), "UsagePage"),
});

const playgroundRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/playground",
  validateSearch: z.object({
    model: text,
    tenant: text,
    system: text,
    max_tokens: number,
    temperature: number,
    top_p: number,
    seed: number,
  }),
  component: lazyRouteComponent(
    () => import("./pages/playground/PlaygroundPage"),
    "PlaygroundPage",
  ),
});

const settingsRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "/settings",
  component: lazyRouteComponent(() => import("./pages/settings/SettingsPage"), "SettingsPage"),
});

/** An address that is none, with the navigation around it. */
const absentRoute = createRoute({
  getParentRoute: () => appRoute,
  path: "$",
  component: NotFound,
});

const routeTree = rootRoute.addChildren([
  loginRoute,
  appRoute.addChildren([
    indexRoute,
    fleetRoute,
    modelsRoute,
    modelRoute,
    routesRoute,
    tenantsRoute,
    tenantRoute,
    decisionsRoute,
    eventsRoute,
    auditRoute,
    requestsRoute,
    usageRoute,
    playgroundRoute,
    settingsRoute,
    absentRoute,
  ]),
]);

export function makeRouter(queries: QueryClient) {
  return createRouter({ routeTree, context: { queries }, defaultPreload: "intent" });
}

declare module "@tanstack/react-router" {
  interface Register {
    router: ReturnType<typeof makeRouter>;
  }
}
