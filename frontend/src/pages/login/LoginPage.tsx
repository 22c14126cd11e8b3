import { Alert, Button, PasswordInput, Stack, TextInput, Title } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { getRouteApi, useRouter } from "@tanstack/react-router";
import { type FormEvent, useEffect, useState } from "react";
import { logIn, signInMethodsQuery } from "@/api/session";
import { Logo } from "@/ui/Logo";
import { ProblemAlert } from "@/ui/ProblemAlert";
import classes from "./LoginPage.module.css";

const route = getRouteApi("/login");

/** Where to go after: only a path of this site, never an address that a link brought along. */
export function safeNext(next: string | undefined): string {
  return next?.startsWith("/") && !next.startsWith("//") && !next.includes("\\") ? next : "/fleet";
}

/** The API reference is a page of the server's, which the router does not know. */
export function follow(next: string | undefined, push: Go, load: Go): void {
  const path = safeNext(next);
  if (path.startsWith("/api/")) load(path);
  else push(path);
}

type Go = (path: string) => void;

function useLogIn(username: string, password: string) {
  const { next } = route.useSearch();
  const queries = useQueryClient();
  const router = useRouter();
  return useMutation({
    mutationFn: () => logIn(username, password),
    onSuccess: (session) => {
      queries.clear();
      queries.setQueryData(["session"], session);
      follow(
        next,
        (path) => router.history.push(path),
        (path) => window.location.assign(path),
      );
    },
  });
}

export function LoginPage() {
  useEffect(() => {
    document.title = "Sign in · Engine";
  }, []);
  return (
    <main className={classes.page}>
      <div className={classes.card}>
        <div className={classes.brand}>
          <Logo size={22} />
          <Title order={1}>Sign in to Engine</Title>
        </div>
        <LoginForm />
        <OtherMethods />
        <p className={classes.hint}>
          First start? <span className="mono">make run</span> prints the login;{" "}
          <span className="mono">manage.py create_admin</span> makes one, or a new password.
        </p>
      </div>
    </main>
  );
}

const FAILURES: Record<string, string> = {
  oidc_no_role: "The provider signed you in, but gives you no role here.",
  oidc_no_tenant: "The provider signed you in, but you belong to no tenant of this installation.",
  oidc_name_taken: "Another user of the provider has your name here. Ask an administrator.",
};

/** What the browser can go to instead of a password; none unless the server has one. */
function OtherMethods() {
  const { error } = route.useSearch();
  const methods = useQuery(signInMethodsQuery).data ?? [];
  return (
    <Stack gap="xs" mt="md">
      {error && (
        <Alert color="red" role="alert">
          {FAILURES[error] ?? "The provider's answer was not accepted. Try again."}
        </Alert>
      )}
      {methods.map(({ name, url }) => (
        <Button key={url} component="a" href={url} variant="default" size="sm">
          {name}
        </Button>
      ))}
    </Stack>
  );
}

function LoginForm() {
  const [username, setUsername] = useState("");
  const [password, setPassword] = useState("");
  const login = useLogIn(username, password);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    login.mutate();
  };
  return (
    <form onSubmit={submit}>
      <Stack gap="sm">
        <TextInput
          label="Username"
          autoComplete="username"
          required
          size="sm"
          data-autofocus
          value={username}
          onChange={(event) => setUsername(event.currentTarget.value)}
        />
        <PasswordInput
          label="Password"
          autoComplete="current-password"
          required
          size="sm"
          value={password}
          onChange={(event) => setPassword(event.currentTarget.value)}
        />
        {login.isError && <ProblemAlert error={login.error} />}
        <Button type="submit" size="sm" mt="xs" loading={login.isPending}>
          Sign in
        </Button>
      </Stack>
    </form>
  );
}
