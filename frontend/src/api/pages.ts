/** Following the `next` links of paginated lists. */
import type { Page } from "./types";

const LIMIT = 200;
const MAX_PAGES = 50;

type Query = Record<string, string | number>;

/** Every row of a list that is small by nature (nodes, models, tenants, routes). */
export async function allRows<T>(get: (query: Query) => Promise<Page<T>>): Promise<T[]> {
  const rows: T[] = [];
  let query: Query | null = { limit: LIMIT };
  for (let page = 0; query !== null && page < MAX_PAGES; page++) {
    const answer: Page<T> = await get(query);
    rows.push(...answer.results);
    query = nextQuery(answer.next);
  }
  return rows;
}

/** The query of a `next` link, without what the client adds itself. */
export function nextQuery(next: string | null | undefined): Query | null {
  if (!next) return null;
  const params = new URL(next, "http://localhost").searchParams;
  params.delete("min_position");
  return Object.fromEntries(params);
}
