import { Button } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconCode } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useEffect, useRef } from "react";
import { tenantsQuery } from "@/api/tenants";
import { Empty } from "@/ui/Empty";
import { Page } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { CodeModal } from "./CodeModal";
import { Composer } from "./Composer";
import classes from "./Playground.module.css";
import { SettingsPanel } from "./SettingsPanel";
import { type PlaygroundSettings, requestOf } from "./settings";
import { TurnView } from "./TurnView";
import { messagesOf, type Turn } from "./turns";
import { type Conversation, useConversation } from "./useConversation";
import { type TargetGroup, useTargets } from "./useTargets";

const route = getRouteApi("/app/playground");

/** The URL's settings, with the first model and tenant where it names none. */
function useSettings(targets: TargetGroup[] | undefined): PlaygroundSettings {
  const search = route.useSearch();
  const tenants = useQuery(tenantsQuery).data;
  return {
    ...search,
    model: search.model ?? targets?.[0]?.items[0],
    tenant: search.tenant ?? tenants?.find((tenant) => !tenant.suspended)?.tenant_id,
  };
}

export function PlaygroundPage() {
  const targets = useTargets();
  const settings = useSettings(targets);
  const tenants = useQuery(tenantsQuery).data;
  const conversation = useConversation();
  return (
    <Page
      title="Playground"
      sub="Requests go through the gateway like any client's: limited, billed and recorded."
      actions={<Actions settings={settings} conversation={conversation} />}
    >
      {targets?.length === 0 && <NoModel />}
      {tenants?.length === 0 && <NoTenant />}
      {targets && targets.length > 0 && tenants && tenants.length > 0 && (
        <Bench targets={targets} settings={settings} conversation={conversation} />
      )}
    </Page>
  );
}

interface PartProps {
  settings: PlaygroundSettings;
  conversation: Conversation;
}

function Actions({ settings, conversation }: PartProps) {
  const [opened, code] = useDisclosure(false);
  const { turns, running, clear } = conversation;
  const last = turns.at(-1)?.prompt ?? "Hello!";
  const messages = messagesOf(settings.system ?? "", turns.slice(0, -1), last);
  return (
    <>
      <Button variant="default" leftSection={<IconCode size={14} />} onClick={code.open}>
        Copy as code
      </Button>
      <Button variant="default" disabled={running || turns.length === 0} onClick={clear}>
        Clear
      </Button>
      <CodeModal request={requestOf(settings, messages)} opened={opened} onClose={code.close} />
    </>
  );
}

function Bench({ settings, conversation, targets }: PartProps & { targets: TargetGroup[] }) {
  const navigate = route.useNavigate();
  const { turns, running } = conversation;
  const { model, tenant } = settings;
  const send = (prompt: string) => {
    const request = requestOf(settings, messagesOf(settings.system ?? "", turns, prompt));
    if (tenant) conversation.send(tenant, prompt, request);
  };
  const change = (part: PlaygroundSettings) =>
    navigate({ search: (old) => ({ ...old, ...part }), replace: true });
  return (
    <div className={classes.layout}>
      <div className={classes.chat}>
        <Turns turns={turns} />
        <Composer
          running={running}
          disabled={!model || !tenant}
          onSend={send}
          onStop={conversation.stop}
        />
      </div>
      <SettingsPanel settings={settings} targets={targets} change={change} />
    </div>
  );
}

/** Follows the answer as it grows, unless the reader has scrolled up. */
function Turns({ turns }: { turns: Turn[] }) {
  const box = useRef<HTMLDivElement>(null);
  const size = turns.reduce((sum, turn) => sum + turn.answer.length + 1, 0);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `size` is what moves the end
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const below = element.scrollHeight - element.scrollTop - element.clientHeight;
    if (below < 160) element.scrollTop = element.scrollHeight;
  }, [size]);
  return (
    <div ref={box} className={classes.turns} role="log" aria-label="Conversation">
      {turns.length === 0 && (
        <span className={classes.hint}>
          The answer streams in here, with its time to first token and its rate.
        </span>
      )}
      {turns.map((turn) => (
        <TurnView key={turn.id} turn={turn} />
      ))}
    </div>
  );
}

function NoModel() {
  const link = (
    <RouterAnchor to="/models" search={{ register: true }} size="sm">
      Register a model
    </RouterAnchor>
  );
  return (
    <Empty title="No model to talk to" action={link}>
      Register a model and add a version; it can be used here once a replica is ready.
    </Empty>
  );
}

function NoTenant() {
  const link = (
    <RouterAnchor to="/tenants" search={{ create: true }} size="sm">
      Create a tenant
    </RouterAnchor>
  );
  return (
    <Empty title="No tenant to bill" action={link}>
      Every request belongs to a tenant. Create one; no key is needed for the playground.
    </Empty>
  );
}
