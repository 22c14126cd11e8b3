import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef } from "react";
import type { LogEvent } from "@/api/types";
import { integer } from "@/ui/format";
import { Time } from "@/ui/Time";
import classes from "./Events.module.css";
import { gist } from "./gist";

const ROW = 34;

interface EventListProps {
  rows: LogEvent[];
  onOpen: (event: LogEvent) => void;
  onEnd: () => void;
}

/** Only the rows in view exist; the next page is fetched when the end comes near. */
export function EventList({ rows, onOpen, onEnd }: EventListProps) {
  const box = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => box.current,
    estimateSize: () => ROW,
    overscan: 12,
    getItemKey: (index) => rows[index]?.position ?? index,
  });
  const items = virtual.getVirtualItems();
  const nearEnd = (items.at(-1)?.index ?? 0) >= rows.length - 20;
  useEffect(() => {
    if (nearEnd) onEnd();
  }, [nearEnd, onEnd]);
  return (
    <section ref={box} className={classes.list} aria-label="Events">
      <div className={classes.inner} style={{ height: virtual.getTotalSize() }}>
        {items.map(({ key, index, start }) => {
          const event = rows[index];
          return event && <EventRow key={key} event={event} top={start} onOpen={onOpen} />;
        })}
      </div>
    </section>
  );
}

const BAD = /Failed|Lost|Refused/;

interface EventRowProps {
  event: LogEvent;
  top: number;
  onOpen: (event: LogEvent) => void;
}

function EventRow({ event, top, onOpen }: EventRowProps) {
  return (
    <button
      type="button"
      className={classes.row}
      style={{ transform: `translateY(${top}px)` }}
      onClick={() => onOpen(event)}
    >
      <span className={`mono ${classes.position}`}>{integer(event.position)}</span>
      <span className={classes.soft}>
        <Time at={event.recorded_at} />
      </span>
      <span className={BAD.test(event.type) ? classes.bad : ""}>{event.type}</span>
      <span className={classes.soft}>{gist(event)}</span>
      <span className="mono">{event.stream}</span>
      <span className={classes.soft}>{event.actor}</span>
    </button>
  );
}
