/* The fake is plain JavaScript so that Node runs it as it is; this is all the tests need of it. */
export interface FakeCall {
  method: string;
  path: string;
  query: Record<string, string>;
  headers: Record<string, string>;
  body?: Record<string, unknown>;
}

export interface FakeAnswer {
  status: number;
  headers: Record<string, string>;
  body?: unknown;
}

// biome-ignore lint/suspicious/noExplicitAny: rows of many shapes, checked by what the pages show
type Row = any;

export class FakeBackend {
  state: Record<string, Row>;
  user: string | null;
  role: string;
  methods: { name: string; url: string }[];
  calls: FakeCall[];
  handle(call: FakeCall): FakeAnswer;
  weigh(order: Pick<FakeCall, "query" | "headers" | "body">): FakeAnswer;
  append(stream: string, type: string, data: object, actor: string): Row;
}
