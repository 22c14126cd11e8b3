import { Button } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useCurrency } from "@/api/fleet";
import { type RequestFilters, requestsQuery } from "@/api/history";
import type { RequestRecord } from "@/api/types";
import { Async } from "@/ui/Async";
import { DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { Page } from "@/ui/Page";
import { requestColumns } from "./columns";
import { RequestDrawer } from "./RequestDrawer";
import { RequestFilterBar } from "./RequestFilterBar";

const route = getRouteApi("/app/requests");

export function RequestsPage() {
  const { open, ...filters } = route.useSearch();
  const navigate = route.useNavigate();
  const show = (request_id: string | undefined) =>
    navigate({ search: (old) => ({ ...old, open: request_id }) });
  return (
    <Page
      title="Requests"
      sub="The ledger: one record per inference request. Prompts are kept only where a tenant asked for it."
    >
      <RequestFilterBar
        key={JSON.stringify(filters)}
        filters={filters}
        onChange={(change) => navigate({ search: { ...filters, ...change }, replace: true })}
      />
      <RequestList filters={filters} onOpen={show} />
      <RequestDrawer requestId={open} onClose={() => show(undefined)} />
    </Page>
  );
}

interface RequestListProps {
  filters: RequestFilters;
  onOpen: (request_id: string) => void;
}

function RequestList({ filters, onOpen }: RequestListProps) {
  const currency = useCurrency();
  const requests = useInfiniteQuery(requestsQuery(filters));
  const rows = requests.data?.pages.flatMap((page) => page.results);
  return (
    <Async query={requests}>
      {rows?.length === 0 ? (
        <NoRequests filtered={Object.values(filters).some(Boolean)} />
      ) : (
        <DataTable
          label="Requests"
          columns={requestColumns(onOpen, currency)}
          rows={rows}
          rowKey={(request: RequestRecord) => request.request_id}
          onRowClick={(request) => onOpen(request.request_id)}
        />
      )}
      {requests.hasNextPage && (
        <Button
          mt="md"
          variant="default"
          loading={requests.isFetchingNextPage}
          onClick={() => requests.fetchNextPage()}
        >
          Older requests
        </Button>
      )}
    </Async>
  );
}

function NoRequests({ filtered }: { filtered: boolean }) {
  if (filtered) return <Empty title="No request matches">Clear a filter above.</Empty>;
  return (
    <Empty title="No request yet">
      Send one from the Playground, or call the gateway with an API key of a tenant.
    </Empty>
  );
}
