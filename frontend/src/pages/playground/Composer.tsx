import { Button, Textarea } from "@mantine/core";
import { IconPlayerStopFilled, IconSend2 } from "@tabler/icons-react";
import { type KeyboardEvent, useState } from "react";
import classes from "./Playground.module.css";

interface ComposerProps {
  running: boolean;
  disabled: boolean;
  onSend: (prompt: string) => void;
  onStop: () => void;
}

export function Composer({ running, disabled, onSend, onStop }: ComposerProps) {
  const [prompt, setPrompt] = useState("");
  const send = () => {
    if (running || disabled || prompt.trim() === "") return;
    onSend(prompt);
    setPrompt("");
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
    event.preventDefault();
    send();
  };
  return (
    <div className={classes.composer}>
      <Textarea
        aria-label="Message"
        placeholder="Write a message"
        autosize
        minRows={2}
        maxRows={8}
        size="sm"
        value={prompt}
        onChange={(event) => setPrompt(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      <div className={classes.composerRow}>
        <span className={classes.hint}>Enter sends, Shift Enter starts a new line</span>
        {running ? (
          <Button
            color="red"
            variant="light"
            leftSection={<IconPlayerStopFilled size={13} />}
            onClick={onStop}
          >
            Stop
          </Button>
        ) : (
          <Button leftSection={<IconSend2 size={14} />} disabled={disabled} onClick={send}>
            Send
          </Button>
        )}
      </div>
    </div>
  );
}
