/** The playground's settings, kept in the URL so that a set-up can be sent to a colleague. */
import type { ChatMessage, ChatRequest } from "@/api/stream";

export interface PlaygroundSettings {
  model?: string;
  tenant?: string;
  system?: string;
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  seed?: number;
}

const DEFAULTS = { max_tokens: 256, temperature: 0.7 };

/** The request of these settings; what is not set is left to the server. */
export function requestOf(settings: PlaygroundSettings, messages: ChatMessage[]): ChatRequest {
  const { model = "", max_tokens, temperature, top_p, seed } = settings;
  return {
    model,
    messages,
    max_tokens: max_tokens ?? DEFAULTS.max_tokens,
    temperature: temperature ?? DEFAULTS.temperature,
    ...(top_p === undefined ? {} : { top_p }),
    ...(seed === undefined ? {} : { seed }),
  };
}
