import { AppShell, Burger } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { spotlight } from "@mantine/spotlight";
import { IconSearch } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { Link, Outlet, useRouter } from "@tanstack/react-router";
import { useEffect } from "react";
import { statusQuery } from "@/api/fleet";
import { sessionQuery } from "@/api/session";
import { Logo } from "@/ui/Logo";
import { AsOfBanner } from "./AsOfBanner";
import { AsOfControl } from "./AsOfControl";
import { LiveBadge } from "./LiveBadge";
import { LiveProvider } from "./LiveContext";
import { Nav } from "./Nav";
import { OfflineBanner } from "./OfflineBanner";
import { Palette } from "./Palette";
import { Past, useMoment } from "./Past";
import classes from "./Shell.module.css";
import { UserMenu } from "./UserMenu";

/** Leaves for the login, and remembers the way back, as soon as the session is gone. */
function useLeaveWhenSignedOut(): boolean {
  const gone = useQuery(sessionQuery).data === null;
  const router = useRouter();
  useEffect(() => {
    if (!gone) return;
    const next = router.state.location.href;
    void router.navigate({ to: "/login", search: { next } });
  }, [gone, router]);
  return gone;
}

export function Shell() {
  if (useLeaveWhenSignedOut()) return null;
  return (
    <LiveProvider>
      <Frame />
      <Palette />
    </LiveProvider>
  );
}

function Frame() {
  const past = useMoment() !== undefined;
  const [opened, menu] = useDisclosure(false);
  return (
    <AppShell
      header={{ height: 48 }}
      navbar={{ width: 196, breakpoint: "sm", collapsed: { mobile: !opened } }}
    >
      <a href="#main" className={classes.skip}>
        Skip to content
      </a>
      <AppShell.Header className={classes.header}>
        <Burger
          opened={opened}
          onClick={menu.toggle}
          hiddenFrom="sm"
          size="sm"
          aria-label="Navigation menu"
        />
        <Brand />
        <SearchButton />
        <AsOfControl />
        {past || <LiveBadge />}
        <UserMenu />
      </AppShell.Header>
      <AppShell.Navbar className={classes.navbar} aria-label="Main">
        <Nav onNavigate={menu.close} />
      </AppShell.Navbar>
      <AppShell.Main id="main">
        <OfflineBanner />
        <AsOfBanner />
        <Past>
          <Outlet />
        </Past>
      </AppShell.Main>
    </AppShell>
  );
}

function Brand() {
  const cluster = useQuery(statusQuery).data?.cluster_id;
  return (
    <Link to="/fleet" className={classes.brand}>
      <Logo />
      Engine
      {cluster && cluster !== "engine" && <span className={classes.cluster}>{cluster}</span>}
    </Link>
  );
}

function SearchButton() {
  return (
    <button type="button" className={classes.search} onClick={spotlight.open} aria-label="Search">
      <IconSearch size={14} aria-hidden />
      <span>Go to…</span>
      <kbd>{/Mac/.test(navigator.userAgent) ? "⌘" : "Ctrl"} K</kbd>
    </button>
  );
}
