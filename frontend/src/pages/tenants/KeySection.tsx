import { ActionIcon, Button, Menu, Text } from "@mantine/core";
import { IconDots } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useMayWrite } from "@/api/session";
import { keysQuery } from "@/api/tenants";
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
import { keyState, overlapOf, resumption, revocation, suspension } from "./keys";
import { RotateKeyModal } from "./RotateKeyModal";
import { SecretModal } from "./SecretModal";

export function KeySection({ tenantId }: { tenantId: string }) {
  const writable = useMayWrite("key");
  const [issuing, setIssuing] = useState(false);
  const [rotating, setRotating] = useState<ApiKey | null>(null);
  const [issued, setIssued] = useState<IssuedKey | null>(null);
  const issue = writable && <Button onClick={() => setIssuing(true)}>Issue key</Button>;
  return (
    <Section title="API keys" actions={issue}>
      <KeyTable tenantId={tenantId} writable={writable} onRotate={setRotating} />
      <IssueKeyModal
        tenantId={tenantId}
        opened={issuing}
        onClose={() => setIssuing(false)}
        onIssued={setIssued}
      />
      <RotateKeyModal apiKey={rotating} onClose={() => setRotating(null)} onRotated={setIssued} />
      <SecretModal issued={issued} onClose={() => setIssued(null)} />
    </Section>
  );
}

interface KeyTableProps {
  tenantId: string;
  writable: boolean;
  onRotate: (key: ApiKey) => void;
}

function KeyTable({ tenantId, writable, onRotate }: KeyTableProps) {
  const keys = useQuery(keysQuery(tenantId));
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const actions = (key: ApiKey) =>
    writable && !key.revoked ? (
      <KeyMenu apiKey={key} onAsk={setAsk} onRotate={() => onRotate(key)} />
    ) : null;
  return (
    <Async query={keys}>
      {keys.data?.length === 0 ? (
        <Empty title="No key yet">
          Press “Issue key”. Its secret is shown once and goes into a client as the API key.
        </Empty>
      ) : (
        <DataTable
          label="API keys"
          columns={[...columns, { title: "", right: true, cell: actions }]}
          rows={keys.data}
          rowKey={(key) => key.key_id}
        />
      )}
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Async>
  );
}

interface KeyMenuProps {
  apiKey: ApiKey;
  onAsk: (ask: Confirmation) => void;
  onRotate: () => void;
}

function KeyMenu({ apiKey, onAsk, onRotate }: KeyMenuProps) {
  const pause = apiKey.suspended ? resumption(apiKey) : suspension(apiKey);
  return (
    <Menu position="bottom-end" width={170}>
      <Menu.Target>
        <ActionIcon aria-label={`Actions for ${apiKey.name}`} size="sm">
          <IconDots size={16} />
        </ActionIcon>
      </Menu.Target>
      <Menu.Dropdown>
        <Menu.Item onClick={onRotate}>Rotate secret</Menu.Item>
        <Menu.Item onClick={() => onAsk(pause)}>
          {apiKey.suspended ? "Resume" : "Suspend"}
        </Menu.Item>
        <Menu.Divider />
        <Menu.Item color="red" onClick={() => onAsk(revocation(apiKey))}>
          Revoke
        </Menu.Item>
      </Menu.Dropdown>
    </Menu>
  );
}

function Standing({ apiKey }: { apiKey: ApiKey }) {
  const overlap = overlapOf(apiKey);
  return (
    <>
      <Status value={keyState(apiKey)} />
      {overlap && (
        <Text size="xs" c="dimmed">
          {overlap}
        </Text>
      )}
    </>
  );
}

const columns: Column<ApiKey>[] = [
  { title: "Name", cell: (key) => key.name },
  { title: "State", cell: (key) => <Standing apiKey={key} /> },
  { title: "Key", cell: (key) => <Id value={`sk_${key.key_id}`} /> },
  { title: "Ends in", minor: true, cell: (key) => <span className="mono">…{key.last4}</span> },
  { title: "Role", minor: true, cell: (key) => key.role },
  { title: "Scopes", minor: true, cell: (key) => key.scopes.join(", ") },
  { title: "Models", minor: true, cell: (key) => key.models.join(", ") || "all" },
  {
    title: "Budgets",
    minor: true,
    cell: (key) => key.applies.map((budget) => budget.budget_id).join(", ") || "none",
  },
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
];
