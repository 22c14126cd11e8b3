/** The playground's request as code to paste elsewhere. The key is a placeholder on purpose. */
import type { ChatRequest } from "./stream";

export function asCurl(gatewayUrl: string, request: ChatRequest): string {
  const json = JSON.stringify({ ...request, stream: true }, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${gatewayUrl}/v1/chat/completions \\`,
    `  -H "Authorization: Bearer $ENGINE_API_KEY" \\`,
    `  -H "Content-Type: application/json" \\`,
    `  -d '${json}'`,
  ].join("\n");
}

export function asOpenAiPython(gatewayUrl: string, request: ChatRequest): string {
  const { model, messages, ...params } = request;
  const lines = Object.entries(params).map(([name, value]) => `    ${name}=${value},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${gatewayUrl}/v1", api_key=os.environ["ENGINE_API_KEY"])`,
    "stream = client.chat.completions.create(",
    `    model=${JSON.stringify(model)},`,
    `    messages=${JSON.stringify(messages)},`,
    ...lines,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}
