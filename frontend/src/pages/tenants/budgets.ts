import type { BudgetRule } from "@/api/types";

/** An amount as its unit is read: tokens in groups of three, money as the exact text it came as. */
export function amount(unit: BudgetRule["unit"], text: string, currency: string): string {
  if (unit === "money") return `${text} ${currency}`;
  return `${text.replaceAll(/\B(?=(\d{3})+$)/g, ",")} tokens`;
}

/** "5,000,000 tokens a month", "2.5 USD in total". */
export function limitText({ unit, limit, period }: BudgetRule, currency: string): string {
  return `${amount(unit, limit, currency)} ${period === "total" ? "in total" : `a ${period}`}`;
}

/** What a budget matches: "all requests", "key 4f2a91c07d3e", "model zen-72b". */
export function scopeText({ scope, target }: BudgetRule): string {
  return scope === "tenant" ? "all requests" : `${scope} ${target}`;
}
