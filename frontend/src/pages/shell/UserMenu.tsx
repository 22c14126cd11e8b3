import { ActionIcon, Menu, useMantineColorScheme } from "@mantine/core";
import {
  IconDeviceDesktop,
  IconLogout,
  IconMoon,
  IconSun,
  IconUserCircle,
} from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { forgetPosition } from "@/api/client";
import { logOut, sessionQuery } from "@/api/session";
import { toastProblem } from "@/ui/notify";

const SCHEMES = [
  { value: "auto", label: "Theme: as the system", icon: IconDeviceDesktop },
  { value: "light", label: "Theme: light", icon: IconSun },
  { value: "dark", label: "Theme: dark", icon: IconMoon },
] as const;

function SchemeItems() {
  const { colorScheme, setColorScheme } = useMantineColorScheme();
  return SCHEMES.map(({ value, label, icon: Icon }) => (
    <Menu.Item
      key={value}
      leftSection={<Icon size={15} />}
      aria-current={colorScheme === value}
      onClick={() => setColorScheme(value)}
      fw={colorScheme === value ? 600 : 400}
    >
      {label}
    </Menu.Item>
  ));
}

function useLogOut() {
  const queries = useQueryClient();
  return () =>
    logOut()
      .then(() => {
        forgetPosition();
        queries.setQueryData(["session"], null);
      })
      .catch(toastProblem);
}

export function UserMenu() {
  const session = useQuery(sessionQuery).data;
  const leave = useLogOut();
  return (
    <Menu position="bottom-end" width={210}>
      <Menu.Target>
        <ActionIcon aria-label="Account and theme" size="lg">
          <IconUserCircle size={19} stroke={1.6} />
        </ActionIcon>
      </Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>
          {session?.username} · {session?.role}
        </Menu.Label>
        <SchemeItems />
        <Menu.Divider />
        <Menu.Item leftSection={<IconLogout size={15} />} onClick={leave}>
          Sign out
        </Menu.Item>
      </Menu.Dropdown>
    </Menu>
  );
}
