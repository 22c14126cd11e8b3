import { Button } from "@mantine/core";
import { IconChevronRight } from "@tabler/icons-react";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { decisionQuery, decisionsQuery } from "@/api/history";
import type { Decision } from "@/api/types";
import { Async } from "@/ui/Async";
import { Empty } from "@/ui/Empty";
import { integer } from "@/ui/format";
import { Page } from "@/ui/Page";
import { Time } from "@/ui/Time";
import { DecisionDetail } from "./DecisionDetail";
import classes from "./Decisions.module.css";
import { summary } from "./sentences";

const route = getRouteApi("/app/decisions");

export function DecisionsPage() {
  const decisions = useInfiniteQuery(decisionsQuery);
  const rows = decisions.data?.pages.flatMap((page) => page.results);
  return (
    <Page
      title="Decisions"
      sub="Why each replica runs where it runs: the candidates, their scores, and what was ruled out."
    >
      <Async query={decisions}>
        {rows?.length === 0 && (
          <Empty title="Nothing was placed yet">
            The planner decides when a node joins and a model has a version. Add a version under
            Models, and start an agent if Fleet is empty.
          </Empty>
        )}
        {rows && rows.length > 0 && <DecisionList rows={rows} />}
        {decisions.hasNextPage && (
          <Button
            mt="md"
            variant="default"
            loading={decisions.isFetchingNextPage}
            onClick={() => decisions.fetchNextPage()}
          >
            Older decisions
          </Button>
        )}
      </Async>
    </Page>
  );
}

/** A decision that a link names may be older than what is listed; it is then fetched alone. */
function DecisionList({ rows }: { rows: Decision[] }) {
  const { open } = route.useSearch();
  const navigate = route.useNavigate();
  const listed = rows.some(({ decision_id }) => decision_id === open);
  const alone = useQuery({ ...decisionQuery(open ?? ""), enabled: open !== undefined && !listed });
  const shown = alone.data ? [alone.data, ...rows] : rows;
  const toggle = (id: string) => navigate({ search: { open: id === open ? undefined : id } });
  return (
    <ul className={classes.list}>
      {shown.map((decision) => (
        <DecisionItem
          key={decision.decision_id}
          decision={decision}
          open={decision.decision_id === open}
          onToggle={() => toggle(decision.decision_id)}
        />
      ))}
    </ul>
  );
}

interface DecisionItemProps {
  decision: Decision;
  open: boolean;
  onToggle: () => void;
}

function DecisionItem({ decision, open, onToggle }: DecisionItemProps) {
  return (
    <li className={classes.item}>
      <button type="button" className={classes.toggle} aria-expanded={open} onClick={onToggle}>
        <IconChevronRight size={14} aria-hidden />
        <span className={classes.soft}>Generation {integer(decision.generation)}</span>
        <span>{summary(decision)}</span>
        <span className={classes.soft}>
          <Time at={decision.at} />
        </span>
      </button>
      {open && <DecisionDetail decision={decision} />}
    </li>
  );
}
