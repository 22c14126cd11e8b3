import {
  IconActivity,
  IconBox,
  IconCoins,
  IconGitBranch,
  IconListDetails,
  IconMessage2Code,
  IconReportSearch,
  IconRoute2,
  IconServer2,
  IconSettings,
  IconUsersGroup,
} from "@tabler/icons-react";

export interface NavItem {
  to:
    | "/fleet"
    | "/models"
    | "/routes"
    | "/tenants"
    | "/decisions"
    | "/events"
    | "/audit"
    | "/requests"
    | "/usage"
    | "/playground"
    | "/settings";
  label: string;
  about: string;
  icon: typeof IconServer2;
}

export const NAV: { title: string; items: NavItem[] }[] = [
  {
    title: "Operate",
    items: [
      { to: "/fleet", label: "Fleet", about: "Nodes and devices", icon: IconServer2 },
      { to: "/models", label: "Models", about: "Versions and replicas", icon: IconBox },
      { to: "/routes", label: "Routes", about: "Traffic between versions", icon: IconRoute2 },
      { to: "/tenants", label: "Tenants", about: "Keys and budgets", icon: IconUsersGroup },
    ],
  },
  {
    title: "Understand",
    items: [
      { to: "/decisions", label: "Decisions", about: "Why it runs there", icon: IconGitBranch },
      { to: "/events", label: "Events", about: "The log, live", icon: IconActivity },
      { to: "/audit", label: "Audit", about: "Who changed what", icon: IconReportSearch },
      { to: "/requests", label: "Requests", about: "The ledger", icon: IconListDetails },
      { to: "/usage", label: "Usage", about: "Tokens and money", icon: IconCoins },
    ],
  },
  {
    title: "Use",
    items: [
      { to: "/playground", label: "Playground", about: "Try a model", icon: IconMessage2Code },
      { to: "/settings", label: "Settings", about: "Health and export", icon: IconSettings },
    ],
  },
];
