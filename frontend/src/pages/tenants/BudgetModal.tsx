import { Select, TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useCurrency } from "@/api/fleet";
import { setBudget, tenantQuery } from "@/api/tenants";
import type { Budget, BudgetRule } from "@/api/types";
import { FormModal } from "@/ui/FormModal";

const NEW: BudgetRule = {
  budget_id: "all",
  scope: "tenant",
  target: "",
  unit: "tokens",
  limit: "1000000",
  period: "month",
};
const SCOPES = [
  { value: "tenant", label: "all requests" },
  { value: "key", label: "one key" },
  { value: "model", label: "one model" },
];
const TARGETS = { key: "Key id, or jwt:<sub> of a token", model: "Model, in any version" };

interface BudgetModalProps {
  tenantId: string;
  budget: Budget | null;
  onClose: () => void;
}

export function BudgetModal({ tenantId, budget, onClose }: BudgetModalProps) {
  const currency = useCurrency();
  const etag = useQuery(tenantQuery(tenantId)).data?.etag ?? "";
  const [rule, setRule] = useState<BudgetRule>(budget ?? NEW);
  const change = (part: Partial<BudgetRule>) => setRule({ ...rule, ...part });
  return (
    <FormModal
      title={budget ? `Budget ${budget.budget_id} of ${tenantId}` : `New budget of ${tenantId}`}
      opened
      onClose={onClose}
      submitLabel="Save budget"
      submit={() => setBudget(tenantId, rule, etag)}
      done={`Budget ${rule.budget_id} is in effect`}
      touches={["tenants"]}
    >
      <TextInput
        label="Name"
        required
        disabled={budget !== null}
        value={rule.budget_id}
        onChange={(event) => change({ budget_id: event.currentTarget.value })}
      />
      <Scope rule={rule} change={change} />
      <Select
        label="Counts"
        data={[
          { value: "tokens", label: "tokens, prompt and output together" },
          { value: "money", label: `money, in ${currency}` },
        ]}
        allowDeselect={false}
        value={rule.unit}
        onChange={(unit) => unit && change({ unit: unit as BudgetRule["unit"] })}
      />
      <TextInput
        label="Limit"
        description="0 admits nothing."
        inputMode="decimal"
        required
        value={rule.limit}
        onChange={(event) => change({ limit: event.currentTarget.value })}
      />
      <Select
        label="Per"
        data={["day", "month", "total"]}
        allowDeselect={false}
        value={rule.period}
        onChange={(period) => period && change({ period: period as BudgetRule["period"] })}
      />
    </FormModal>
  );
}

interface ScopeProps {
  rule: BudgetRule;
  change: (part: Partial<BudgetRule>) => void;
}

function Scope({ rule: { scope, target }, change }: ScopeProps) {
  return (
    <>
      <Select
        label="Matches"
        data={SCOPES}
        allowDeselect={false}
        value={scope}
        onChange={(value) => value && change({ scope: value as BudgetRule["scope"], target: "" })}
      />
      {scope !== "tenant" && (
        <TextInput
          label={TARGETS[scope]}
          required
          value={target}
          onChange={(event) => change({ target: event.currentTarget.value })}
        />
      )}
    </>
  );
}
