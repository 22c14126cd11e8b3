import { ActionIcon, Button } from "@mantine/core";
import { IconChevronLeft, IconChevronRight, IconHistory } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import type { Moment } from "@/api/asOf";
import { lastEventQuery } from "@/api/events";
import { statusQuery } from "@/api/fleet";
import type { LogEvent } from "@/api/types";
import { absolute, integer, words } from "@/ui/format";
import { useGoTo, useHonoursMoment, useMoment } from "./Past";
import classes from "./Shell.module.css";

/** Says, on every page, that what is shown is not now; and leads back. */
export function AsOfBanner() {
  const asOf = useMoment();
  if (asOf === undefined) return null;
  return <Banner asOf={asOf} />;
}

function Banner({ asOf }: { asOf: Moment }) {
  const last = useQuery(lastEventQuery(asOf));
  const honoured = useHonoursMoment();
  const goTo = useGoTo();
  const position = last.data?.position ?? (typeof asOf === "number" ? asOf : 0);
  return (
    <div role="status" className={classes.past} aria-label="As of">
      <IconHistory size={15} aria-hidden />
      <span className={classes.pastText}>
        {honoured ? <Shown asOf={asOf} event={last.data} failed={last.isError} /> : PRESENT}
      </span>
      <Steps position={position} />
      <Button size="compact-xs" onClick={() => goTo(undefined)}>
        Back to live
      </Button>
    </div>
  );
}

const PRESENT = "This page always shows the present; the others show the past.";

interface ShownProps {
  asOf: Moment;
  event: LogEvent | null | undefined;
  failed: boolean;
}

function Shown({ asOf, event, failed }: ShownProps) {
  if (failed) return `There is no moment “${asOf}” in this log.`;
  if (event === undefined) return "Looking up the moment …";
  if (event === null) return "Before the first event of the log.";
  return (
    <>
      As of position <b>{integer(event.position)}</b>, {absolute(event.recorded_at)}
      <span className={classes.pastEvent}>
        {" "}
        · {words(event.type)} · <span className="mono">{event.stream}</span>
      </span>
    </>
  );
}

/** One event back or forward. */
function Steps({ position }: { position: number }) {
  const head = useQuery(statusQuery).data?.head ?? position;
  const goTo = useGoTo();
  return (
    <>
      <ActionIcon
        variant="subtle"
        size="sm"
        aria-label="One event earlier"
        disabled={position < 1}
        onClick={() => goTo(position - 1)}
      >
        <IconChevronLeft size={15} />
      </ActionIcon>
      <ActionIcon
        variant="subtle"
        size="sm"
        aria-label="One event later"
        disabled={position >= head}
        onClick={() => goTo(position + 1)}
      >
        <IconChevronRight size={15} />
      </ActionIcon>
    </>
  );
}
