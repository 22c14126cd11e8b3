import { Button, NumberInput, Popover, Slider, Stack, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconHistory } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { type FormEvent, useState } from "react";
import type { Moment } from "@/api/asOf";
import { statusQuery } from "@/api/fleet";
import { integer } from "@/ui/format";
import { useGoTo, useMoment } from "./Past";
import classes from "./Shell.module.css";

/** "As of": choose a time or a position of the log, and every page shows what was then. */
export function AsOfControl() {
  const [opened, popover] = useDisclosure(false);
  const past = useMoment() !== undefined;
  return (
    <Popover opened={opened} onChange={popover.toggle} position="bottom-end" trapFocus withArrow>
      <Popover.Target>
        <Button
          variant={past ? "light" : "default"}
          size="compact-sm"
          classNames={{ section: classes.asOfIcon }}
          leftSection={<IconHistory size={14} />}
          aria-label="As of"
          onClick={popover.toggle}
        >
          <span className={classes.asOfLabel}>{past ? "Past" : "As of"}</span>
        </Button>
      </Popover.Target>
      <Popover.Dropdown w={290}>{opened && <Choice onDone={popover.close} />}</Popover.Dropdown>
    </Popover>
  );
}

function Choice({ onDone }: { onDone: () => void }) {
  const goTo = useGoTo();
  const past = useMoment() !== undefined;
  const choose = (asOf: Moment | undefined) => {
    goTo(asOf);
    onDone();
  };
  return (
    <Stack gap="md">
      <ByTime onChoose={choose} />
      <ByPosition onChoose={choose} />
      {past && (
        <Button variant="default" onClick={() => choose(undefined)}>
          Back to live
        </Button>
      )}
    </Stack>
  );
}

interface ChoiceProps {
  onChoose: (asOf: Moment) => void;
}

function ByTime({ onChoose }: ChoiceProps) {
  const [time, setTime] = useState("");
  const submit = (event: FormEvent) => {
    event.preventDefault();
    const at = new Date(time);
    if (!Number.isNaN(at.getTime())) onChoose(at.toISOString());
  };
  return (
    <form onSubmit={submit} className={classes.choice}>
      <TextInput
        type="datetime-local"
        step={1}
        label="Time"
        description="In your time zone"
        value={time}
        onChange={(event) => setTime(event.currentTarget.value)}
      />
      <Button type="submit">Go</Button>
    </form>
  );
}

function ByPosition({ onChoose }: ChoiceProps) {
  const head = useQuery(statusQuery).data?.head ?? 0;
  const current = useMoment();
  const [position, setPosition] = useState(typeof current === "number" ? current : head);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    onChoose(position);
  };
  return (
    <div>
      <form onSubmit={submit} className={classes.choice}>
        <NumberInput
          label="Log position"
          description={`0 to ${integer(head)}`}
          min={0}
          max={head}
          allowDecimal={false}
          value={position}
          onChange={(value) => setPosition(Number(value))}
        />
        <Button type="submit">Go</Button>
      </form>
      <Slider
        mt="sm"
        min={0}
        max={head}
        value={position}
        label={integer}
        thumbLabel="Log position"
        onChange={setPosition}
        onChangeEnd={onChoose}
      />
    </div>
  );
}
