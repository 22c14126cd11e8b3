import { Button } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { useState } from "react";
import { useMayWrite } from "@/api/session";
import { resumeTenant, suspendTenant, tenantQuery } from "@/api/tenants";
import type { Tenant } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { Page } from "@/ui/Page";
import { Status } from "@/ui/Status";
import { BudgetSection } from "./BudgetSection";
import { CaptureSection } from "./CaptureSection";
import { KeySection } from "./KeySection";
import { TierSelect } from "./TierSelect";

const route = getRouteApi("/app/tenants/$id");

export function TenantPage() {
  const { id } = route.useParams();
  const tenant = useQuery(tenantQuery(id));
  const writable = useMayWrite("tenant");
  const value = tenant.data?.value;
  return (
    <Page
      title={id}
      heading={<span className="mono">{id}</span>}
      sub={value && <Standing tenant={value} />}
      actions={value && <Actions tenant={value} writable={writable} />}
    >
      <Async query={tenant}>
        {tenant.data && (
          <>
            <KeySection tenantId={id} />
            <BudgetSection tenantId={id} />
            <CaptureSection tenant={tenant.data.value} etag={tenant.data.etag} />
            {writable && <TierSelect tenant={tenant.data.value} etag={tenant.data.etag} />}
          </>
        )}
      </Async>
    </Page>
  );
}

function Standing({ tenant }: { tenant: Tenant }) {
  if (!tenant.suspended) return <Status value="active" label={`Active · ${tenant.tier} tier`} />;
  const why = tenant.suspended_reason && `: ${tenant.suspended_reason}`;
  return <Status value="suspended" label={`Suspended${why}`} />;
}

function suspension({ tenant_id, suspended }: Tenant): Confirmation {
  if (suspended) {
    return {
      title: `Resume ${tenant_id}`,
      text: "Its keys work again at once.",
      label: "Resume tenant",
      done: `${tenant_id} is active again`,
      touches: ["tenants"],
      run: (reason) => resumeTenant(tenant_id, reason),
    };
  }
  return {
    title: `Suspend ${tenant_id}`,
    text: "New requests with any of its keys are refused within a second. Nothing is deleted.",
    label: "Suspend tenant",
    done: `${tenant_id} is suspended`,
    touches: ["tenants"],
    danger: true,
    run: (reason) => suspendTenant(tenant_id, reason),
  };
}

function Actions({ tenant, writable }: { tenant: Tenant; writable: boolean }) {
  const [ask, setAsk] = useState<Confirmation | null>(null);
  return (
    <>
      <Button
        variant="default"
        renderRoot={(root) => (
          <Link to="/requests" search={{ tenant: tenant.tenant_id }} {...root} />
        )}
      >
        Requests
      </Button>
      {writable && (
        <Button variant="default" onClick={() => setAsk(suspension(tenant))}>
          {tenant.suspended ? "Resume" : "Suspend"}
        </Button>
      )}
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </>
  );
}
