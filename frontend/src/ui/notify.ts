import { notifications } from "@mantine/notifications";
import { asProblem } from "@/api/problem";

export function toastDone(message: string): void {
  notifications.show({ message, color: "signal", autoClose: 4_000 });
}

export function toastProblem(error: unknown): void {
  const problem = asProblem(error);
  const message = [problem.detail, problem.code && `(${problem.code})`].filter(Boolean).join(" ");
  notifications.show({ title: problem.title, message, color: "red", autoClose: 8_000 });
}
