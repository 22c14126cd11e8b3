import type { Node } from "@/api/types";

/** Why a node drains, as it was said with the order, and for which versions no other has room. */
export function Draining({ node }: { node: Node }) {
  if (!node.draining) return null;
  const { drain_reason, drain_waits_for } = node;
  return (
    <>
      {drain_reason && <div>Draining: {drain_reason}</div>}
      {drain_waits_for.length > 0 && (
        <div role="status">
          The drain waits for room on other nodes for {drain_waits_for.join(", ")}.
        </div>
      )}
    </>
  );
}
