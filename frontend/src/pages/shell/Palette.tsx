import { Spotlight, type SpotlightActionGroupData } from "@mantine/spotlight";
import { IconBox, IconRoute2, IconSearch, IconServer2, IconUsersGroup } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { nodesQuery } from "@/api/fleet";
import { modelsQuery } from "@/api/models";
import { routesQuery } from "@/api/routes";
import { tenantsQuery } from "@/api/tenants";
import { NAV } from "./nav";

function usePages(): SpotlightActionGroupData {
  const navigate = useNavigate();
  const actions = NAV.flatMap((group) => group.items).map((item) => ({
    id: `page ${item.to}`,
    label: item.label,
    description: item.about,
    leftSection: <item.icon size={16} />,
    onClick: () => navigate({ to: item.to }),
  }));
  return { group: "Pages", actions };
}

function useThings(): SpotlightActionGroupData[] {
  const navigate = useNavigate();
  const models = useQuery(modelsQuery).data ?? [];
  const nodes = useQuery(nodesQuery).data ?? [];
  const tenants = useQuery(tenantsQuery).data ?? [];
  const routes = useQuery(routesQuery).data ?? [];
  const action = (kind: string, name: string, Icon: typeof IconBox, onClick: () => unknown) => ({
    id: `${kind} ${name}`,
    label: name,
    description: kind,
    leftSection: <Icon size={16} />,
    onClick: () => void onClick(),
  });
  const toModel = (name: string) => navigate({ to: "/models/$name", params: { name } });
  const toNode = (node: string) => navigate({ to: "/fleet", search: { node } });
  const toTenant = (id: string) => navigate({ to: "/tenants/$id", params: { id } });
  const toRoute = (edit: string) => navigate({ to: "/routes", search: { edit } });
  return [
    {
      group: "Models",
      actions: models.map((m) => action("model", m.name, IconBox, () => toModel(m.name))),
    },
    {
      group: "Nodes",
      actions: nodes.map((n) => action("node", n.node_id, IconServer2, () => toNode(n.node_id))),
    },
    {
      group: "Tenants",
      actions: tenants.map((t) =>
        action("tenant", t.tenant_id, IconUsersGroup, () => toTenant(t.tenant_id)),
      ),
    },
    {
      group: "Routes",
      actions: routes.map((r) => action("route", r.name, IconRoute2, () => toRoute(r.name))),
    },
  ];
}

/** Ctrl/⌘ K: go to a page or a thing by its name. */
export function Palette() {
  const groups = [usePages(), ...useThings()];
  return (
    <Spotlight
      actions={groups}
      shortcut={["mod + K"]}
      nothingFound="Nothing by that name"
      highlightQuery
      scrollable
      limit={12}
      searchProps={{
        leftSection: <IconSearch size={16} />,
        placeholder: "Go to a page, model, node, tenant or route",
        "aria-label": "Search",
      }}
    />
  );
}
