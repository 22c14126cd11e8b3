import { Modal, Tabs, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { statusQuery } from "@/api/fleet";
import { asCurl, asOpenAiPython } from "@/api/snippets";
import type { ChatRequest } from "@/api/stream";
import { Code } from "@/ui/Json";

interface CodeModalProps {
  request: ChatRequest;
  opened: boolean;
  onClose: () => void;
}

export function CodeModal({ request, opened, onClose }: CodeModalProps) {
  const gateway = useQuery(statusQuery).data?.gateway_url ?? "";
  return (
    <Modal opened={opened} onClose={onClose} title="This request as code" size="xl">
      <Text size="sm" mb="sm">
        Set <span className="mono">ENGINE_API_KEY</span> to a key of the tenant first.
      </Text>
      <Tabs defaultValue="curl">
        <Tabs.List mb="sm">
          <Tabs.Tab value="curl">curl</Tabs.Tab>
          <Tabs.Tab value="python">openai-python</Tabs.Tab>
        </Tabs.List>
        <Tabs.Panel value="curl">
          <Code text={asCurl(gateway, request)} label="curl command" />
        </Tabs.Panel>
        <Tabs.Panel value="python">
          <Code text={asOpenAiPython(gateway, request)} label="Python code" />
        </Tabs.Panel>
      </Tabs>
    </Modal>
  );
}
