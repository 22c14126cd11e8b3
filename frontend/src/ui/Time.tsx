import { Tooltip } from "@mantine/core";
import { useNow } from "./clock";
import { absolute, ago } from "./format";

/** Relative time, with the absolute one on hover and for screen readers. */
export function Time({ at }: { at: number | string | null | undefined }) {
  const now = useNow();
  return (
    <Tooltip label={absolute(at)}>
      <time style={{ whiteSpace: "nowrap" }}>{ago(at, now)}</time>
    </Tooltip>
  );
}
