import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client, idempotencyKey, ifMatch, tagged } from "./client";
import { allRows } from "./pages";
import type { BudgetRule, NewKey, Tier } from "./types";

export const tenantsQuery = queryOptions({
  queryKey: ["tenants"],
  queryFn: (asked) =>
    allRows((query) =>
      body(
        client.GET("/api/v1/tenants/", { params: { query: { ...query, ...asOfQuery(asked) } } }),
      ),
    ),
});

export function tenantQuery(tenant_id: string) {
  const path = { tenant_id };
  return queryOptions({
    queryKey: ["tenants", tenant_id],
    queryFn: (asked) =>
      tagged(
        client.GET("/api/v1/tenants/{tenant_id}/", { params: { path, query: asOfQuery(asked) } }),
      ),
  });
}

export function budgetsQuery(tenant_id: string) {
  const path = { tenant_id };
  return queryOptions({
    queryKey: ["tenants", tenant_id, "budgets"],
    queryFn: (asked) =>
      allRows((page) => {
        const query = { ...page, ...asOfQuery(asked) };
        return body(
          client.GET("/api/v1/tenants/{tenant_id}/budgets/", { params: { path, query } }),
        );
      }),
  });
}

export function keysQuery(tenant_id: string) {
  const path = { tenant_id };
  return queryOptions({
    queryKey: ["tenants", tenant_id, "keys"],
    queryFn: (asked) =>
      allRows((page) => {
        const query = { ...page, ...asOfQuery(asked) };
        return body(client.GET("/api/v1/tenants/{tenant_id}/keys/", { params: { path, query } }));
      }),
  });
}

export function createTenant(name: string, tier: Tier) {
  return body(client.POST("/api/v1/tenants/", { body: { name, tier }, headers: idempotencyKey() }));
}

export function changeTier(tenant_id: string, tier: Tier, etag: string) {
  return body(
    client.PATCH("/api/v1/tenants/{tenant_id}/", {
      params: { path: { tenant_id } },
      body: { tier },
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}

export function suspendTenant(tenant_id: string, reason: string) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/suspend/", {
      params: { path: { tenant_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

export function resumeTenant(tenant_id: string, reason: string) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/resume/", {
      params: { path: { tenant_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

export function setCapture(
  tenant_id: string,
  captures_text: boolean,
  reason: string,
  etag: string,
) {
  return body(
    client.PUT("/api/v1/tenants/{tenant_id}/capture/", {
      params: { path: { tenant_id } },
      body: { captures_text, reason },
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}

/** Nothing captured until now can be read once it is answered. */
export function eraseText(tenant_id: string, reason: string) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/erase-text/", {
      params: { path: { tenant_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

/** In effect on every gateway once it is answered. */
export function setBudget(tenant_id: string, rule: BudgetRule, etag: string) {
  const { budget_id, scope, target, unit, limit, period } = rule;
  return body(
    client.PUT("/api/v1/tenants/{tenant_id}/budgets/{budget_id}/", {
      params: { path: { tenant_id, budget_id } },
      body: { scope, target, unit, limit, period },
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}

interface BudgetOrder {
  tenantId: string;
  budgetId: string;
}

function budgetCall({ tenantId, budgetId }: BudgetOrder) {
  const path = { tenant_id: tenantId, budget_id: budgetId };
  return { params: { path }, headers: idempotencyKey() };
}

export function removeBudget(order: BudgetOrder) {
  const path = "/api/v1/tenants/{tenant_id}/budgets/{budget_id}/";
  return body(client.DELETE(path, budgetCall(order)));
}

export function resetBudget(order: BudgetOrder, reason: string) {
  const reset = { ...budgetCall(order), body: { reason } };
  return body(client.POST("/api/v1/tenants/{tenant_id}/budgets/{budget_id}/reset/", reset));
}

/** The answer holds the secret, once; it is kept nowhere. */
export function issueKey(tenant_id: string, key: NewKey) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/keys/", {
      params: { path: { tenant_id } },
      body: key,
      headers: idempotencyKey(),
    }),
  );
}

/** As issuing: the new secret is shown once. The old one is good until then (Unix seconds). */
export function rotateKey(tenant_id: string, key_id: string, previous_valid_until: number) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/keys/{key_id}/rotate/", {
      params: { path: { tenant_id, key_id } },
      body: { previous_valid_until },
      headers: idempotencyKey(),
    }),
  );
}

export function suspendKey(tenant_id: string, key_id: string, reason: string) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/keys/{key_id}/suspend/", {
      params: { path: { tenant_id, key_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

export function resumeKey(tenant_id: string, key_id: string, reason: string) {
  return body(
    client.POST("/api/v1/tenants/{tenant_id}/keys/{key_id}/resume/", {
      params: { path: { tenant_id, key_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

/** A DELETE has no body, so the reason travels as a header, which takes no letters beyond ASCII. */
export function revokeKey(tenant_id: string, key_id: string, reason: string) {
  return body(
    client.DELETE("/api/v1/tenants/{tenant_id}/keys/{key_id}/", {
      params: { path: { tenant_id, key_id } },
      headers: { ...idempotencyKey(), "X-Reason": encodeURIComponent(reason) },
    }),
  );
}

export function issueTicket(tenant: string) {
  return body(client.POST("/api/v1/tickets/", { body: { tenant } }));
}
