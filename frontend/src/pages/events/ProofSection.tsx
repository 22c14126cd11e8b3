import { Button } from "@mantine/core";
import { IconShieldCheck } from "@tabler/icons-react";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { checkpointQuery, startVerification, verificationQuery } from "@/api/proof";
import { useMayWrite } from "@/api/session";
import type { Checkpoint, Verification } from "@/api/types";
import { Facts } from "@/ui/Facts";
import { integer } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Section } from "@/ui/Page";
import { ProblemAlert } from "@/ui/ProblemAlert";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";

/** What is sealed, how long ago, and whether everything stored still agrees with the seals. */
export function ProofSection() {
  const mayVerify = useMayWrite("verification");
  const events = useQuery(checkpointQuery("events"));
  const requests = useQuery(checkpointQuery("requests"));
  const error = events.error ?? requests.error;
  const items: [string, ReactNode][] = [
    ["Events", <Sealed key="events" checkpoint={events.data} />],
    ["Requests", <Sealed key="requests" checkpoint={requests.data} />],
  ];
  if (mayVerify) items.push(["Verified", <LastVerification key="verified" />]);
  return (
    <Section title="Proof" actions={mayVerify && <VerifyButton />}>
      {error ? <ProblemAlert error={error} /> : <Facts items={items} />}
    </Section>
  );
}

function Sealed({ checkpoint }: { checkpoint: Checkpoint | null | undefined }) {
  if (!checkpoint) return "not sealed yet";
  return (
    <>
      {integer(checkpoint.size)} sealed <Time at={checkpoint.at} /> under{" "}
      <Id value={checkpoint.root} short={12} />
    </>
  );
}

function VerifyButton() {
  const queries = useQueryClient();
  const running = useQuery(verificationQuery).data?.running ?? false;
  const start = useMutation({
    mutationFn: startVerification,
    onSuccess: (result) => queries.setQueryData(verificationQuery.queryKey, result),
  });
  return (
    <Button
      variant="default"
      leftSection={<IconShieldCheck size={14} />}
      loading={running || start.isPending}
      onClick={() => start.mutate()}
    >
      Verify now
    </Button>
  );
}

function LastVerification() {
  const { data, error } = useQuery(verificationQuery);
  if (error) return <ProblemAlert error={error} />;
  if (!data || data.at === null) return data?.running ? "running" : "never";
  return <Result verification={data} at={data.at} />;
}

function Result({ verification, at }: { verification: Verification; at: number }) {
  const { finding } = verification;
  return (
    <>
      <Status
        value={finding ? "failed" : "ok"}
        label={finding ? `Not intact: ${named(finding)}` : "Intact"}
      />{" "}
      <Time at={at} />
    </>
  );
}

function named(finding: NonNullable<Verification["finding"]>): string {
  const id = finding.record_id ? ` (${finding.record_id})` : "";
  return `${finding.log} ${finding.position}${id}, ${finding.detail}`;
}
