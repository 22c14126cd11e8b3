import { Button, Text } from "@mantine/core";
import { useState } from "react";
import { useMayWrite } from "@/api/session";
import { eraseText, setCapture } from "@/api/tenants";
import type { Tenant } from "@/api/types";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { Section } from "@/ui/Page";
import { Status } from "@/ui/Status";

/** Whether prompts and answers are kept, and the way to be rid of them. */
export function CaptureSection({ tenant, etag }: { tenant: Tenant; etag: string }) {
  const writable = useMayWrite("text");
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const on = tenant.captures_text;
  return (
    <Section
      title="Captured text"
      actions={
        writable && (
          <>
            <Button variant="default" onClick={() => setAsk(switching(tenant, etag))}>
              {on ? "Stop capturing" : "Capture text"}
            </Button>
            <Button variant="default" onClick={() => setAsk(erasing(tenant))}>
              Erase text
            </Button>
          </>
        )
      }
    >
      <Status
        value={on ? "active" : "stopped"}
        label={on ? "Prompts and answers are kept, encrypted" : "No prompt or answer is kept"}
      />
      <Text size="xs" c="dimmed">
        What is kept can be read by administrators with the scope text:read alone; each reading is
        in the audit.
      </Text>
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Section>
  );
}

function switching({ tenant_id, captures_text }: Tenant, etag: string): Confirmation {
  const run = (reason: string) => setCapture(tenant_id, !captures_text, reason, etag);
  if (captures_text) {
    return {
      title: `Stop capturing text of ${tenant_id}`,
      text: "Nothing more is kept. What was captured stays until it is erased or too old.",
      label: "Stop capturing",
      done: `Text of ${tenant_id} is captured no more`,
      touches: ["tenants"],
      run,
    };
  }
  return {
    title: `Capture text of ${tenant_id}`,
    text: "Prompts and answers of its requests are kept from now on, encrypted under its own key.",
    label: "Capture text",
    done: `Text of ${tenant_id} is captured`,
    touches: ["tenants"],
    run,
  };
}

function erasing({ tenant_id }: Tenant): Confirmation {
  return {
    title: `Erase text of ${tenant_id}`,
    text: "Its key is destroyed: nothing captured until now is ever read again, by anybody.",
    label: "Erase text",
    done: `Text of ${tenant_id} is erased`,
    touches: ["tenants"],
    danger: true,
    needsReason: true,
    run: (reason) => eraseText(tenant_id, reason),
  };
}
