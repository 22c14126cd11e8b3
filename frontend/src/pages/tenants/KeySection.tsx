import { Button } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useMayWrite } from "@/api/session";
import { keysQuery, revokeKey } from "@/api/tenants";
import type { ApiKey, IssuedKey } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { Id } from "@/ui/Id";
import { Section } from "@/ui/Page";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";
import { IssueKeyModal } from "./IssueKeyModal";
import { SecretModal } from "./SecretModal";

export function KeySection({ tenantId }: { tenantId: string }) {
  const writable = useMayWrite("key");
  const [issuing, setIssuing] = useState(false);
  const [issued, setIssued] = useState<IssuedKey | null>(null);
  const issue = writable && <Button onClick={() => setIssuing(true)}>Issue key</Button>;
  return (
    <Section title="API keys" actions={issue}>
      <KeyTable tenantId={tenantId} writable={writable} />
      <IssueKeyModal
        tenantId={tenantId}
        opened={issuing}
        onClose={() => setIssuing(false)}
        onIssued={setIssued}
      />
      <SecretModal issued={issued} onClose={() => setIssued(null)} />
    </Section>
  );
}

function revocation(tenantId: string, key: ApiKey): Confirmation {
  return {
    title: `Revoke key “${key.name}”`,
    text: "Requests with this key are refused within a second. It cannot be brought back.",
    label: "Revoke key",
    done: `Key ${key.name} is revoked`,
    touches: ["tenants"],
    danger: true,
    run: () => revokeKey(tenantId, key.key_id),
  };
}

function KeyTable({ tenantId, writable }: { tenantId: string; writable: boolean }) {
  const keys = useQuery(keysQuery(tenantId));
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const revoke = writable ? (key: ApiKey) => setAsk(revocation(tenantId, key)) : undefined;
  return (
    <Async query={keys}>
      {keys.data?.length === 0 ? (
        <Empty title="No key yet">
          Press “Issue key”. Its secret is shown once and goes into a client as the API key.
        </Empty>
      ) : (
        <DataTable
          label="API keys"
          columns={columns(revoke)}
          rows={keys.data}
          rowKey={(key) => key.key_id}
        />
      )}
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Async>
  );
}

function keyState(key: ApiKey): string {
  if (key.revoked) return "revoked";
  const expired = key.expires_at !== null && key.expires_at * 1_000 < Date.now();
  return expired ? "expired" : "active";
}

function columns(revoke: ((key: ApiKey) => void) | undefined): Column<ApiKey>[] {
  return [
    { title: "Name", cell: (key) => key.name },
    { title: "State", cell: (key) => <Status value={keyState(key)} /> },
    { title: "Key", cell: (key) => <Id value={`sk_${key.key_id}`} /> },
    { title: "Ends in", minor: true, cell: (key) => <span className="mono">…{key.last4}</span> },
    { title: "Scopes", minor: true, cell: (key) => key.scopes.join(", ") },
    {
      title: "Last used",
      minor: true,
      cell: (key) => (key.last_used_at ? <Time at={key.last_used_at} /> : "never"),
    },
    {
      title: "Expires",
      minor: true,
      cell: (key) =>
        key.expires_at ? new Date(key.expires_at * 1_000).toLocaleDateString("sv-SE") : "never",
    },
    {
      title: "",
      right: true,
      cell: (key) =>
        revoke &&
        keyState(key) === "active" && (
          <Button variant="subtle" color="red" size="compact-xs" onClick={() => revoke(key)}>
            Revoke
          </Button>
        ),
    },
  ];
}
