import { Button } from "@mantine/core";
import { IconPlus } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useState } from "react";
import { deleteRoute, routeQuery, routesQuery } from "@/api/routes";
import { useMayWrite } from "@/api/session";
import type { Route } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { Empty } from "@/ui/Empty";
import { Page } from "@/ui/Page";
import { RouteCard } from "./RouteCard";
import { RouteModal } from "./RouteModal";

const page = getRouteApi("/app/routes");

export function RoutesPage() {
  const { create, edit } = page.useSearch();
  const navigate = page.useNavigate();
  const writable = useMayWrite("route");
  const close = () => navigate({ search: {} });
  const add = writable && (
    <Button
      leftSection={<IconPlus size={14} />}
      onClick={() => navigate({ search: { create: true } })}
    >
      Create route
    </Button>
  );
  return (
    <Page
      title="Routes"
      sub="A route is a name that clients ask for; its arms share the traffic by weight."
      actions={add}
    >
      <RouteList writable={writable} onEdit={(name) => navigate({ search: { edit: name } })} />
      {create && <RouteModal opened onClose={close} />}
      {edit && <EditRoute name={edit} onClose={close} />}
    </Page>
  );
}

/** The form keeps what was typed when the ETag is refreshed after somebody else's change. */
function EditRoute({ name, onClose }: { name: string; onClose: () => void }) {
  const known = useQuery(routeQuery(name)).data;
  if (!known) return null;
  return <RouteModal opened onClose={onClose} known={known} />;
}

function deletion({ name }: Route): Confirmation {
  return {
    title: `Delete route ${name}`,
    text: `Requests for “${name}” are answered with “model not found” from then on.`,
    label: "Delete route",
    done: `Route ${name} is deleted`,
    touches: ["routes"],
    danger: true,
    run: () => deleteRoute(name),
  };
}

function RouteList(props: { writable: boolean; onEdit: (name: string) => void }) {
  const routes = useQuery(routesQuery);
  const [ask, setAsk] = useState<Confirmation | null>(null);
  return (
    <Async query={routes}>
      {routes.data?.length === 0 && (
        <Empty title="No route yet">
          Press “Create route” to split traffic between two versions, for example 90 % to the old
          one and 10 % to the new one. Models can be asked for by their own name without a route.
        </Empty>
      )}
      {routes.data?.map((route) => (
        <RouteCard
          key={route.name}
          route={route}
          writable={props.writable}
          onEdit={() => props.onEdit(route.name)}
          onDelete={() => setAsk(deletion(route))}
        />
      ))}
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Async>
  );
}
