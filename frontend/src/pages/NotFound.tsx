import { Empty } from "@/ui/Empty";
import { Page } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";

export function NotFound() {
  const toFleet = (
    <RouterAnchor to="/fleet" size="sm">
      Go to Fleet
    </RouterAnchor>
  );
  return (
    <Page title="Not found">
      <Empty title="There is no such page" action={toFleet}>
        The address may be mistyped, or the thing it named was deleted.
      </Empty>
    </Page>
  );
}
