import { resumeKey, revokeKey, suspendKey } from "@/api/tenants";
import type { ApiKey } from "@/api/types";
import type { Confirmation } from "@/ui/ConfirmModal";
import { absolute } from "@/ui/format";

export function keyState(key: ApiKey): string {
  if (key.revoked) return "revoked";
  const expired = key.expires_at !== null && key.expires_at * 1_000 < Date.now();
  if (expired) return "expired";
  return key.suspended ? "suspended" : "active";
}

/** What is to be known of a secret that was rotated away and is still good; "" if none is. */
export function overlapOf(key: ApiKey): string {
  const until = key.previous_valid_until;
  if (key.revoked || until === null || until * 1_000 < Date.now()) return "";
  const used = key.previous_last_used_at;
  const last = used ? `last used ${absolute(used)}` : "never used since it was noted";
  return `Old secret until ${absolute(until)}, ${last}`;
}

export function revocation({ tenant_id, key_id, name }: ApiKey): Confirmation {
  return {
    title: `Revoke key “${name}”`,
    text: "Requests with this key are refused within a second. It cannot be brought back.",
    label: "Revoke key",
    done: `Key ${name} is revoked`,
    touches: ["tenants"],
    danger: true,
    run: (reason) => revokeKey(tenant_id, key_id, reason),
  };
}

export function suspension({ tenant_id, key_id, name }: ApiKey): Confirmation {
  return {
    title: `Suspend key “${name}”`,
    text: "Requests with this key are refused within a second, until it is resumed.",
    label: "Suspend key",
    done: `Key ${name} is suspended`,
    touches: ["tenants"],
    danger: true,
    run: (reason) => suspendKey(tenant_id, key_id, reason),
  };
}

export function resumption({ tenant_id, key_id, name }: ApiKey): Confirmation {
  return {
    title: `Resume key “${name}”`,
    text: "It works again at once.",
    label: "Resume key",
    done: `Key ${name} works again`,
    touches: ["tenants"],
    run: (reason) => resumeKey(tenant_id, key_id, reason),
  };
}
