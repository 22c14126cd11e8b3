import { Button, Drawer } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { type AuditFilters, auditQuery } from "@/api/audit";
import type { AuditEntry } from "@/api/types";
import { Async } from "@/ui/Async";
import { DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { integer } from "@/ui/format";
import { Page } from "@/ui/Page";
import { AuditDetail } from "./AuditDetail";
import { AuditFilterBar } from "./AuditFilterBar";
import { auditColumns } from "./columns";

const route = getRouteApi("/app/audit");

export function AuditPage() {
  const { open, ...filters } = route.useSearch();
  const navigate = route.useNavigate();
  const show = (position: number | undefined) =>
    navigate({ search: (old) => ({ ...old, open: position }) });
  return (
    <Page title="Audit" sub="Who ordered what, what it changed, and what was refused.">
      <AuditFilterBar
        key={JSON.stringify(filters)}
        filters={filters}
        onChange={(change) => navigate({ search: { ...filters, ...change }, replace: true })}
      />
      <AuditList filters={filters} open={open} onOpen={show} />
    </Page>
  );
}

interface AuditListProps {
  filters: AuditFilters;
  open: number | undefined;
  onOpen: (position: number | undefined) => void;
}

function AuditList({ filters, open, onOpen }: AuditListProps) {
  const audit = useInfiniteQuery(auditQuery(filters));
  const rows = audit.data?.pages.flatMap((page) => page.results);
  const chosen = rows?.find((entry) => entry.position === open);
  return (
    <Async query={audit}>
      {rows?.length === 0 ? (
        <NoEntries filtered={Object.values(filters).some(Boolean)} />
      ) : (
        <DataTable
          label="Audit"
          columns={auditColumns(onOpen)}
          rows={rows}
          rowKey={(entry: AuditEntry) => String(entry.position)}
          onRowClick={(entry) => onOpen(entry.position)}
        />
      )}
      {audit.hasNextPage && (
        <Button
          mt="md"
          variant="default"
          loading={audit.isFetchingNextPage}
          onClick={() => audit.fetchNextPage()}
        >
          Older entries
        </Button>
      )}
      <Drawer
        opened={chosen !== undefined}
        onClose={() => onOpen(undefined)}
        title={`Audit entry ${integer(open ?? 0)}`}
      >
        {chosen && <AuditDetail entry={chosen} />}
      </Drawer>
    </Async>
  );
}

function NoEntries({ filtered }: { filtered: boolean }) {
  if (filtered) return <Empty title="No entry matches">Clear a filter above.</Empty>;
  return (
    <Empty title="Nothing was ordered yet">
      Create a tenant or register a model; each order is kept here, a refused one too.
    </Empty>
  );
}
