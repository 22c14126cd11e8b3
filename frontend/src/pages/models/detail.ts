import type { Model } from "@/api/types";

/** What every part of a model's page needs of it; `etag` guards what it writes. */
export interface DetailProps {
  model: Model;
  etag: string;
  writable: boolean;
}
