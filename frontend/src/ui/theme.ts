import {
  ActionIcon,
  Anchor,
  Badge,
  Button,
  Checkbox,
  createTheme,
  Drawer,
  InputWrapper,
  type MantineColorsTuple,
  Modal,
  Notification,
  NumberInput,
  Select,
  Switch,
  Textarea,
  TextInput,
  Tooltip,
} from "@mantine/core";

/** Sea green, the one accent; status colours are separate and only ever mean status. */
const signal: MantineColorsTuple = [
  "#e4faf2",
  "#c6f2e2",
  "#98e6cb",
  "#66d8b2",
  "#3fcb9d",
  "#22b287",
  "#0f8f6c",
  "#0b7659",
  "#095f48",
  "#054634",
];

/** Neutrals with a trace of green: 0 is text on dark, 9 the darkest ground. */
const dark: MantineColorsTuple = [
  "#dfe6e4",
  "#b4bfbc",
  "#8b9895",
  "#63706d",
  "#2f3b39",
  "#222c2a",
  "#19211f",
  "#111817",
  "#0c1211",
  "#080d0c",
];

const gray: MantineColorsTuple = [
  "#f7f9f8",
  "#eff2f1",
  "#e4e9e7",
  "#d5dcd9",
  "#bcc6c2",
  "#93a09b",
  "#65726d",
  "#4a5652",
  "#333d3a",
  "#1c2422",
];

const veil = { color: "#0b1210", backgroundOpacity: 0.35, blur: 0 };
const panel = { title: { fontWeight: 600, fontSize: 15 } };

const close = { "aria-label": "Close" };
const dense = { defaultProps: { size: "xs" } };

export const theme = createTheme({
  primaryColor: "signal",
  primaryShade: 7,
  colors: { signal, dark, gray },
  defaultRadius: "sm",
  cursorType: "pointer",
  respectReducedMotion: true,
  fontFamily: "'Geist Variable', system-ui, sans-serif",
  fontFamilyMonospace: "'Geist Mono Variable', ui-monospace, monospace",
  fontSizes: { xs: "12px", sm: "13px", md: "14px", lg: "16px", xl: "18px" },
  headings: {
    fontWeight: "550",
    sizes: {
      h1: { fontSize: "18px", lineHeight: "26px" },
      h2: { fontSize: "14px", lineHeight: "20px" },
      h3: { fontSize: "13px", lineHeight: "18px" },
    },
  },
  components: {
    ActionIcon: ActionIcon.extend({
      defaultProps: { variant: "subtle", color: "gray", size: "md" },
    }),
    Anchor: Anchor.extend({ defaultProps: { inherit: true } }),
    Badge: Badge.extend({ defaultProps: { variant: "light", size: "sm", tt: "none" } }),
    Button: Button.extend({ defaultProps: { size: "xs", fw: 500 } }),
    InputWrapper: InputWrapper.extend({ styles: { label: { fontWeight: 500, marginBottom: 3 } } }),
    Checkbox: Checkbox.extend(dense),
    Switch: Switch.extend(dense),
    TextInput: TextInput.extend(dense),
    Textarea: Textarea.extend(dense),
    Notification: Notification.extend({ defaultProps: { closeButtonProps: close } }),
    NumberInput: NumberInput.extend(dense),
    Select: Select.extend({
      defaultProps: { size: "xs", checkIconPosition: "right", comboboxProps: { shadow: "md" } },
    }),
    Modal: Modal.extend({
      defaultProps: {
        centered: true,
        padding: "lg",
        size: "md",
        overlayProps: veil,
        closeButtonProps: close,
      },
      styles: panel,
    }),
    Drawer: Drawer.extend({
      defaultProps: {
        position: "right",
        padding: "lg",
        size: 660,
        overlayProps: veil,
        closeButtonProps: close,
      },
      styles: panel,
    }),
    Spotlight: { defaultProps: { overlayProps: veil } },
    Tooltip: Tooltip.extend({ defaultProps: { withArrow: false, openDelay: 250, fz: "xs" } }),
  },
});
