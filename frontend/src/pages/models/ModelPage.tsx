import { Button } from "@mantine/core";
import { IconMessage2Code, IconPlus } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { modelQuery } from "@/api/models";
import { useMayWrite } from "@/api/session";
import { Async } from "@/ui/Async";
import { Page, Section } from "@/ui/Page";
import { Status } from "@/ui/Status";
import { AccessSection } from "./AccessSection";
import { AddVersionModal } from "./AddVersionModal";
import { AliasSection } from "./AliasSection";
import type { DetailProps } from "./detail";
import { InstancesSection } from "./InstancesSection";
import { modelStatus } from "./replicas";
import { VersionDrawer } from "./VersionDrawer";
import { VersionTable } from "./VersionTable";

const route = getRouteApi("/app/models/$name");

export function ModelPage() {
  const { name } = route.useParams();
  const model = useQuery(modelQuery(name));
  const writable = useMayWrite("model");
  const value = model.data?.value;
  return (
    <Page
      title={name}
      heading={<span className="mono">{name}</span>}
      sub={value && <Status value={modelStatus(value)} />}
      actions={value && <Actions name={name} writable={writable} />}
    >
      <Async query={model}>
        {model.data && (
          <Detail model={model.data.value} etag={model.data.etag} writable={writable} />
        )}
      </Async>
    </Page>
  );
}

function Actions({ name, writable }: { name: string; writable: boolean }) {
  const navigate = route.useNavigate();
  return (
    <>
      <Button
        variant="default"
        leftSection={<IconMessage2Code size={14} />}
        renderRoot={(root) => <Link to="/playground" search={{ model: name }} {...root} />}
      >
        Try it
      </Button>
      {writable && (
        <Button
          leftSection={<IconPlus size={14} />}
          onClick={() => navigate({ search: { add: true } })}
        >
          Add version
        </Button>
      )}
    </>
  );
}

function Detail({ model, etag, writable }: DetailProps) {
  const { version, add } = route.useSearch();
  const navigate = route.useNavigate();
  const close = () => navigate({ search: {} });
  return (
    <>
      <Section title="Versions">
        <VersionTable
          model={model}
          onOpen={(chosen) => navigate({ search: { version: chosen.version } })}
        />
      </Section>
      <InstancesSection model={model} />
      <AliasSection model={model} writable={writable} />
      <AccessSection model={model} etag={etag} writable={writable} />
      <AddVersionModal key={String(add)} model={model} opened={add === true} onClose={close} />
      <VersionDrawer
        model={model}
        etag={etag}
        writable={writable}
        version={model.versions.find((each) => each.version === version)}
        onClose={close}
      />
    </>
  );
}
