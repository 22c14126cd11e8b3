import { ActionIcon, Button, Tooltip } from "@mantine/core";
import { IconCheck, IconCopy } from "@tabler/icons-react";
import { useState } from "react";
import { copyText } from "./clipboard";

function useCopied(value: string): [boolean, () => void] {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    setCopied(await copyText(value));
    setTimeout(() => setCopied(false), 1_500);
  };
  return [copied, copy];
}

export function CopyButton({ value, label }: { value: string; label: string }) {
  const [copied, copy] = useCopied(value);
  return (
    <Tooltip label={copied ? "Copied" : "Copy"}>
      <ActionIcon size={18} aria-label={label} onClick={copy}>
        {copied ? <IconCheck size={12} /> : <IconCopy size={12} />}
      </ActionIcon>
    </Tooltip>
  );
}

export function CopyTextButton({ value, children }: { value: string; children: string }) {
  const [copied, copy] = useCopied(value);
  const icon = copied ? <IconCheck size={14} /> : <IconCopy size={14} />;
  return (
    <Button variant="default" leftSection={icon} onClick={copy}>
      {copied ? "Copied" : children}
    </Button>
  );
}
