import { Select } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { changeTier } from "@/api/tenants";
import type { Tenant, Tier } from "@/api/types";
import { toastDone } from "@/ui/notify";
import { Section } from "@/ui/Page";
import { ProblemAlert } from "@/ui/ProblemAlert";
import { TIERS } from "./TenantsPage";

export function TierSelect({ tenant, etag }: { tenant: Tenant; etag: string }) {
  const queries = useQueryClient();
  const refresh = () => queries.invalidateQueries({ queryKey: ["tenants"] });
  const change = useMutation({
    mutationFn: (tier: Tier) => changeTier(tenant.tenant_id, tier, etag),
    onSuccess: (_result, tier) => {
      toastDone(`${tenant.tenant_id} is in the ${tier} tier`);
      void refresh();
    },
  });
  const reload = () => {
    change.reset();
    void refresh();
  };
  return (
    <Section title="Rate limits">
      {change.isError && <ProblemAlert error={change.error} onRetry={reload} />}
      <Select
        label="Tier"
        description="Requests and tokens per minute, with bursts in proportion."
        w={280}
        data={TIERS}
        allowDeselect={false}
        value={tenant.tier}
        onChange={(tier) => tier && change.mutate(tier as Tier)}
      />
    </Section>
  );
}
