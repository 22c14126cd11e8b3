import { Button, Group, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useCurrency } from "@/api/fleet";
import { useMayWrite } from "@/api/session";
import { budgetsQuery, removeBudget, resetBudget } from "@/api/tenants";
import type { Budget } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { StackBar } from "@/ui/Meter";
import { Section } from "@/ui/Page";
import { BudgetModal } from "./BudgetModal";
import { amount, limitText, scopeText } from "./budgets";

/** The budget in the dialog; null makes a new one, undefined closes it. */
type Edited = Budget | null | undefined;

export function BudgetSection({ tenantId }: { tenantId: string }) {
  const writable = useMayWrite("budget");
  const [edited, setEdited] = useState<Edited>();
  const add = writable && (
    <Button variant="default" onClick={() => setEdited(null)}>
      Add budget
    </Button>
  );
  return (
    <Section title="Budgets" actions={add}>
      <Text size="sm" c="dimmed" mb="xs">
        A request must fit every budget that matches it: the tenant’s, its key’s and its model’s.
        What runs is reserved at its maximum.
      </Text>
      <BudgetTable tenantId={tenantId} onEdit={writable ? setEdited : undefined} />
      {edited !== undefined && (
        <BudgetModal tenantId={tenantId} budget={edited} onClose={() => setEdited(undefined)} />
      )}
    </Section>
  );
}

interface BudgetTableProps {
  tenantId: string;
  onEdit: ((budget: Budget) => void) | undefined;
}

function BudgetTable({ tenantId, onEdit }: BudgetTableProps) {
  const budgets = useQuery(budgetsQuery(tenantId));
  const currency = useCurrency();
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const orders = onEdit && { onEdit, onAsk: setAsk, tenantId };
  return (
    <Async query={budgets}>
      {budgets.data?.length === 0 ? (
        <Empty title="No budget">
          The tenant’s rate is limited by its tier, its total by nothing.
        </Empty>
      ) : (
        <DataTable
          label="Budgets"
          columns={columns(currency, orders)}
          rows={budgets.data}
          rowKey={(budget) => budget.budget_id}
        />
      )}
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Async>
  );
}

interface Orders {
  tenantId: string;
  onEdit: (budget: Budget) => void;
  onAsk: (ask: Confirmation) => void;
}

function columns(currency: string, orders: Orders | undefined): Column<Budget>[] {
  return [
    { title: "Name", cell: (budget) => <span className="mono">{budget.budget_id}</span> },
    { title: "Matches", cell: (budget) => scopeText(budget) },
    { title: "Limit", right: true, cell: (budget) => limitText(budget, currency) },
    { title: "Used", cell: (budget) => <Spending budget={budget} currency={currency} /> },
    { title: "", right: true, cell: (budget) => orders && <Buttons {...orders} budget={budget} /> },
  ];
}

function Spending({ budget, currency }: { budget: Budget; currency: string }) {
  const shown = (text: string) => amount(budget.unit, text, currency);
  const [limit, spent, reserved] = [budget.limit, budget.spent, budget.reserved].map(Number) as [
    number,
    number,
    number,
  ];
  return (
    <div style={{ display: "grid", gap: 4, minWidth: 200 }}>
      <StackBar
        label={`${shown(budget.spent)} spent and ${shown(budget.reserved)} reserved of ${shown(budget.limit)}`}
        total={Math.max(limit, spent + reserved) || 1}
        segments={[
          { key: "spent", label: "spent", value: spent, color: "var(--accent)" },
          { key: "reserved", label: "reserved", value: reserved, color: "var(--tone-busy)" },
        ].filter((segment) => segment.value > 0)}
      />
      <Text size="xs" c="dimmed">
        {shown(budget.spent)} spent · {shown(budget.reserved)} reserved · {shown(budget.remaining)}{" "}
        left
      </Text>
    </div>
  );
}

function Buttons({ tenantId, budget, onEdit, onAsk }: Orders & { budget: Budget }) {
  const order = { tenantId, budgetId: budget.budget_id };
  const reset: Confirmation = {
    title: `Reset budget ${budget.budget_id}`,
    text: "What this period has spent so far counts no more. The usage records stay as they are.",
    label: "Reset budget",
    done: `Budget ${budget.budget_id} starts again`,
    touches: ["tenants"],
    run: (reason) => resetBudget(order, reason),
  };
  const remove: Confirmation = {
    title: `Remove budget ${budget.budget_id}`,
    text: "Requests that only this budget would refuse are admitted from now on.",
    label: "Remove budget",
    done: `Budget ${budget.budget_id} is gone`,
    touches: ["tenants"],
    danger: true,
    run: () => removeBudget(order),
  };
  return (
    <Group gap={4} justify="flex-end" wrap="nowrap">
      <Button variant="subtle" size="compact-xs" onClick={() => onEdit(budget)}>
        Change
      </Button>
      <Button variant="subtle" size="compact-xs" onClick={() => onAsk(reset)}>
        Reset
      </Button>
      <Button variant="subtle" color="red" size="compact-xs" onClick={() => onAsk(remove)}>
        Remove
      </Button>
    </Group>
  );
}
