import { z } from "zod";

const problemSchema = z.object({
  title: z.string().catch("Request failed"),
  detail: z.string().catch(""),
  status: z.number().catch(0),
  code: z.string().catch(""),
  request_id: z.string().catch(""),
  errors: z
    .array(z.object({ pointer: z.string().catch(""), detail: z.string().catch("") }))
    .catch([]),
});

export type Problem = z.infer<typeof problemSchema>;

/** A refused or failed request, with the server's problem+json (RFC 9457). */
export class ProblemError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail || problem.title);
    this.name = "ProblemError";
  }

  get status(): number {
    return this.problem.status;
  }

  /** True when somebody else changed the resource since it was read (If-Match failed). */
  get isConflict(): boolean {
    return this.status === 412 || this.problem.code === "version_conflict";
  }

  /** The message for one form field, matched by the last part of its JSON pointer. */
  fieldError(name: string): string | undefined {
    return this.problem.errors.find((error) => lastPart(error.pointer) === name)?.detail;
  }
}

function lastPart(pointer: string): string {
  return pointer.split(/[/.#]/).filter(Boolean).at(-1) ?? "";
}

/** What the response's body says is wrong; a body that is no JSON still gives a usable problem. */
export function problemFrom(body: unknown, status: number): Problem {
  const parsed = problemSchema.safeParse(body);
  const problem = parsed.success ? parsed.data : problemSchema.parse({});
  return { ...problem, status: problem.status || status };
}

export function networkProblem(): Problem {
  return problemSchema.parse({
    title: "The control plane cannot be reached",
    detail: "The network or the web process is down. The page retries by itself.",
    code: "unreachable",
  });
}

export function asProblem(error: unknown): Problem {
  if (error instanceof ProblemError) return error.problem;
  const detail = error instanceof Error ? error.message : String(error);
  return problemSchema.parse({ title: "Something went wrong", detail });
}
