import { Button, NumberInput, Select, Switch, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useMayWrite } from "@/api/session";
import { budgetQuery, setBudget } from "@/api/tenants";
import type { Budget } from "@/api/types";
import { Async } from "@/ui/Async";
import { FormModal } from "@/ui/FormModal";
import { integer } from "@/ui/format";
import { StackBar } from "@/ui/Meter";
import { Section } from "@/ui/Page";
import { budgetText } from "./TenantsPage";

export function BudgetSection({ tenantId }: { tenantId: string }) {
  const writable = useMayWrite("budget");
  const [editing, setEditing] = useState(false);
  const budget = useQuery(budgetQuery(tenantId));
  const known = budget.data;
  const edit = writable && known && (
    <Button variant="default" onClick={() => setEditing(true)}>
      Set budget
    </Button>
  );
  return (
    <Section title="Budget" actions={edit}>
      <Async query={budget}>
        {known && <Spending budget={known.value} />}
        {editing && known && (
          <BudgetModal
            tenantId={tenantId}
            budget={known.value}
            etag={known.etag}
            onClose={() => setEditing(false)}
          />
        )}
      </Async>
    </Section>
  );
}

function Spending({ budget }: { budget: Budget }) {
  const { tokens, period, spent, reserved } = budget;
  return (
    <div style={{ maxWidth: 520, display: "grid", gap: 6 }}>
      <Text size="sm">{budgetText(tokens, period)}</Text>
      {tokens !== null && (
        <StackBar
          label={`${integer(spent)} spent and ${integer(reserved)} reserved of ${integer(tokens)}`}
          total={Math.max(tokens, spent + reserved, 1)}
          segments={[
            { key: "spent", label: "spent", value: spent, color: "var(--accent)" },
            { key: "reserved", label: "reserved", value: reserved, color: "var(--tone-busy)" },
          ]}
        />
      )}
      <Text size="xs" c="dimmed">
        {integer(spent)} spent · {integer(reserved)} reserved for running requests
        {budget.remaining !== null && ` · ${integer(budget.remaining)} left`}
      </Text>
    </div>
  );
}

interface BudgetModalProps {
  tenantId: string;
  budget: Budget;
  etag: string;
  onClose: () => void;
}

function BudgetModal({ tenantId, budget, etag, onClose }: BudgetModalProps) {
  const [limited, setLimited] = useState(budget.tokens !== null);
  const [tokens, setTokens] = useState(budget.tokens ?? 1_000_000);
  const [period, setPeriod] = useState<string>(budget.period);
  return (
    <FormModal
      title={`Budget of ${tenantId}`}
      opened
      onClose={onClose}
      submitLabel="Save budget"
      submit={() => setBudget(tenantId, limited ? tokens : null, period, etag)}
      done={`Budget of ${tenantId} is set`}
      touches={["tenants"]}
    >
      <Switch
        label="Limit the tokens"
        checked={limited}
        onChange={(event) => setLimited(event.currentTarget.checked)}
      />
      <NumberInput
        label="Tokens"
        description="Prompt and output together. What runs is reserved at its maximum."
        disabled={!limited}
        min={0}
        thousandSeparator=","
        value={tokens}
        onChange={(value) => setTokens(Number(value))}
      />
      <Select
        label="Per"
        data={["day", "month", "total"]}
        allowDeselect={false}
        value={period}
        onChange={(value) => value && setPeriod(value)}
      />
    </FormModal>
  );
}
