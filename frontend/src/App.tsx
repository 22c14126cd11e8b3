import { MantineProvider } from "@mantine/core";
import { Notifications } from "@mantine/notifications";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { useState } from "react";
import { setUnauthorizedHandler } from "./api/client";
import { ProblemError } from "./api/problem";
import { makeRouter } from "./router";
import { theme } from "./ui/theme";

export function makeQueryClient(): QueryClient {
  return new QueryClient({
    defaultOptions: {
      queries: { retry: shouldRetry, staleTime: 10_000, refetchOnWindowFocus: true },
      mutations: { retry: false },
    },
  });
}

/** Ask again only where another try can help: the network, an overloaded or restarting server. */
function shouldRetry(failures: number, error: Error): boolean {
  if (!(error instanceof ProblemError)) return false;
  return failures < 4 && (error.status === 0 || error.status >= 502);
}

/** A session that ended sends every page to the login, which brings the user back after. */
function endSessionOn401(queries: QueryClient): void {
  setUnauthorizedHandler(() => {
    if (queries.getQueryData(["session"]) != null) queries.setQueryData(["session"], null);
  });
}

function makeApp() {
  const queries = makeQueryClient();
  endSessionOn401(queries);
  return { queries, router: makeRouter(queries) };
}

export function App() {
  const [{ queries, router }] = useState(makeApp);
  return (
    <MantineProvider theme={theme} defaultColorScheme="auto">
      <QueryClientProvider client={queries}>
        <RouterProvider router={router} />
        <Notifications position="bottom-right" limit={3} containerWidth={340} />
      </QueryClientProvider>
    </MantineProvider>
  );
}
