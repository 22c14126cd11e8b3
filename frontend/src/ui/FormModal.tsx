import { Button, Group, Modal, Stack } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import type { FormEvent, ReactNode } from "react";
import { toastDone } from "./notify";
import { ProblemAlert } from "./ProblemAlert";

interface FormModalProps<T> {
  title: string;
  opened: boolean;
  onClose: () => void;
  submitLabel: string;
  submit: () => Promise<T>;
  /** The toast after success, or what it is after the given result. */
  done: string | ((result: T) => string);
  /** The first parts of the query keys that the change touches. */
  touches: string[];
  onDone?: (result: T) => void;
  danger?: boolean;
  disabled?: boolean;
  size?: string;
  children: ReactNode;
}

/** A form in a dialog: sends once, shows the server's problem in place, and refetches after. */
export function FormModal<T>(props: FormModalProps<T>) {
  return (
    <Modal opened={props.opened} onClose={props.onClose} title={props.title} size={props.size}>
      <FormBody {...props} />
    </Modal>
  );
}

function useSubmit<T>({ submit, done, touches, onDone, onClose }: FormModalProps<T>) {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: submit,
    onSuccess: (result: T) => {
      for (const key of touches) void queries.invalidateQueries({ queryKey: [key] });
      toastDone(typeof done === "string" ? done : done(result));
      onClose();
      onDone?.(result);
    },
  });
}

function FormBody<T>(props: FormModalProps<T>) {
  const mutation = useSubmit(props);
  const queries = useQueryClient();
  const reload = () => {
    for (const key of props.touches) void queries.invalidateQueries({ queryKey: [key] });
    mutation.reset();
  };
  const onSubmit = (event: FormEvent) => {
    event.preventDefault();
    mutation.mutate();
  };
  return (
    <form onSubmit={onSubmit}>
      <Stack gap="sm">
        {props.children}
        {mutation.isError && <ProblemAlert error={mutation.error} onRetry={reload} />}
        <Group justify="flex-end" gap="xs" mt={4}>
          <Button variant="default" onClick={props.onClose}>
            Cancel
          </Button>
          <Button
            type="submit"
            color={props.danger ? "red" : undefined}
            loading={mutation.isPending}
            disabled={props.disabled}
          >
            {props.submitLabel}
          </Button>
        </Group>
      </Stack>
    </form>
  );
}
