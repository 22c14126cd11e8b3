import { Button, Drawer, Group } from "@mantine/core";
import { useState } from "react";
import { useCurrency } from "@/api/fleet";
import { makeDefault, retireVersion } from "@/api/models";
import type { Version } from "@/api/types";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { Facts } from "@/ui/Facts";
import { bytes, integer } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Status } from "@/ui/Status";
import { Reason } from "@/ui/Stuck";
import type { DetailProps } from "./detail";
import { PriceModal } from "./PriceModal";
import { scaling, statusOf } from "./replicas";
import { ScaleModal } from "./ScaleModal";

interface VersionDrawerProps extends DetailProps {
  version: Version | undefined;
  onClose: () => void;
}

export function VersionDrawer(props: VersionDrawerProps) {
  const { version, onClose, writable } = props;
  const currency = useCurrency();
  return (
    <Drawer opened={version !== undefined} onClose={onClose} title={version?.version_id}>
      {version && (
        <>
          {writable && !version.retired && <Orders {...props} version={version} />}
          <Facts
            items={[...standing(version), price(version, currency), ...specification(version)]}
          />
        </>
      )}
    </Drawer>
  );
}

function standing(version: Version): [string, React.ReactNode][] {
  return [
    ["Status", <Status key="status" value={statusOf(version)} />],
    ["Reason", <Reason key="reason" of={version} />],
    ["Replicas ready", `${version.ready_replicas} of ${version.desired_replicas}`],
    ["Scaling", scaling(version.min_replicas, version.max_replicas)],
  ];
}

function price({ price }: Version, currency: string): [string, React.ReactNode] {
  const { input, cached_input, output } = price;
  const text = `${input} prompt · ${cached_input} cached · ${output} output`;
  return [`${currency} per million tokens`, text];
}

function specification(version: Version): [string, React.ReactNode][] {
  const { colocation, needs } = version;
  return [
    ["Source", <Id key="source" value={version.source} />],
    ["SHA-256", version.sha256 ? <Id key="sha" value={version.sha256} short={16} /> : "not pinned"],
    ["Format", version.format],
    ["Task", version.task],
    ["Memory per device", bytes(version.gpu_memory)],
    ["Tensor parallel", integer(version.tensor_parallel)],
    ["Quantization", version.quantization],
    ["KV cache type", version.kv_cache_dtype],
    ["Batch, at most", integer(version.max_batch)],
    ["Prompt tokens, at most", integer(version.max_prompt_tokens)],
    version.task === "embed"
      ? ["Inputs in a request, at most", integer(version.max_inputs)]
      : ["Output tokens, at most", integer(version.max_output_tokens)],
    ["Priority", version.priority],
    [
      "Guaranteed",
      version.guaranteed_percent ? `${version.guaranteed_percent} % of the device` : "–",
    ],
    ["Residency", version.residency],
    ["Engine", version.engine],
    ["Batching", version.policy],
    ["Isolation", colocation.isolation],
    ["Labels", colocation.labels?.join(", ") || "–"],
    ["Beside", colocation.affinity?.join(", ") || "–"],
    ["Never beside", colocation.anti_affinity?.join(", ") || "–"],
    ["GPU classes", needs.gpu_classes?.join(", ") || "any"],
    ["Typical compute", needs.compute_percent ? `${needs.compute_percent} % of its devices` : "–"],
    ["CPU of its node", needs.cpu_milli ? `${needs.cpu_milli / 1000} cores` : "–"],
    ["Memory of its node", needs.host_memory ? bytes(needs.host_memory) : "–"],
    ["Speculation", version.speculation],
    ["Draft model", version.draft_model || "–"],
    ["Swap space", version.swap_bytes === null ? "chosen by the node" : bytes(version.swap_bytes)],
    ["Disaggregation", version.disaggregation],
  ];
}

function Orders({ model, etag, version }: VersionDrawerProps & { version: Version }) {
  const [scaling, setScaling] = useState(false);
  const [pricing, setPricing] = useState(false);
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const order = { name: model.name, version: version.version, etag };
  const setDefault: Confirmation = {
    title: `Make ${version.version} the default`,
    text: `Requests for “${model.name}” without a version go to ${version.version_id} from now on.`,
    label: "Make default",
    done: `${version.version_id} is the default`,
    touches: ["models"],
    run: (reason) => makeDefault(order, reason),
  };
  const retire: Confirmation = {
    title: `Retire ${version.version_id}`,
    text: "Its replicas are stopped after their running requests, and it cannot be brought back. While a route has an arm of it, or it is the default and other versions are live, it is not retired.",
    label: "Retire version",
    done: `${version.version_id} is retired`,
    touches: ["models"],
    danger: true,
    run: (reason) => retireVersion(order, reason),
  };
  return (
    <Group gap="xs" mb="md">
      <Button variant="default" onClick={() => setScaling(true)}>
        Scale
      </Button>
      <Button variant="default" onClick={() => setPricing(true)}>
        Set price
      </Button>
      {model.default_version !== version.version && (
        <Button variant="default" onClick={() => setAsk(setDefault)}>
          Make default
        </Button>
      )}
      <Button variant="light" color="red" onClick={() => setAsk(retire)}>
        Retire
      </Button>
      <ScaleModal order={order} version={version} opened={scaling} onClose={setScaling} />
      <PriceModal order={order} version={version} opened={pricing} onClose={setPricing} />
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </Group>
  );
}
