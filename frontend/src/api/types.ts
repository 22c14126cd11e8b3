/** The API's resources by the names the pages use; their shapes are generated from openapi.json. */
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Session = Schemas["Session"];
export type Status = Schemas["Status"];
export type Device = Schemas["Device"];
export type Replica = Schemas["Replica"];
export type Node = Schemas["Node"];
export type Price = Schemas["Price"];
export type Version = Schemas["Version"];
export type NewVersion = Schemas["VersionOrderRequest"];
export type Access = Schemas["Access"];
export type Model = Schemas["Model"];
export type Arm = Schemas["Arm"];
export type Route = Schemas["Route"];
export type RouteOrder = Schemas["RouteOrderRequest"];
export type Tenant = Schemas["Tenant"];
export type Retention = Schemas["Retention"];
export type BudgetRule = Schemas["BudgetRule"];
export type Budget = Schemas["Budget"];
export type AuditEntry = Schemas["AuditEntry"];
export type ApiKey = Schemas["Key"];
export type Tier = Schemas["TenantTierEnum"];
export type NewKey = Schemas["KeyOrderRequest"];
export type IssuedKey = Schemas["IssuedKey"];
export type Candidate = Schemas["Candidate"];
export type ScoreTerm = Schemas["ScoreTerm"];
export type Rejection = Schemas["Rejection"];
export type Started = Schemas["Started"];
export type Retiered = Schemas["Retiered"];
export type Stopped = Schemas["Stopped"];
export type Unplaced = Schemas["Unplaced"];
export type Decision = Schemas["Decision"];
export type LogEvent = Schemas["Event"];
export type UndoPreview = Schemas["Undone"];
export type Scaling = Schemas["Scaling"];
export type PreloadTotal = Schemas["PreloadTotal"];
export type Replay = Schemas["Replay"];
export type RequestRecord = Schemas["Request"];
export type Checkpoint = Schemas["Checkpoint"];
export type Verification = Schemas["Verification"];
export type Usage = Schemas["Usage"];
export type Routing = Schemas["Routing"];
export type RoutingWeights = Schemas["RoutingWeights"];
export type Attempt = Schemas["Attempt"];
export type RequestDispatch = Schemas["RequestDispatch"];
export type Dispatch = Schemas["Dispatch"];
export type RejectedReplica = Schemas["RejectedReplica"];
export type DispatchCandidate = Schemas["DispatchCandidate"];
export type Ticket = Schemas["Ticket"];

export interface Page<T> {
  next: string | null;
  previous: string | null;
  results: T[];
}
