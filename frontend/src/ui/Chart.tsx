import { useMantineColorScheme } from "@mantine/core";
import { useElementSize } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import uPlot from "uplot";
import { clockTime } from "./format";

export type Series = [number[], ...(number | null)[][]];

interface ChartProps {
  label: string;
  /** Unix seconds, then one array per series. */
  data: Series;
  series: { name: string; color: string }[];
  format: (value: number) => string;
  max?: number;
}

const HEIGHT = 120;

function cssColor(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888";
}

/** Seconds that the time axis shows at least: uPlot would take years for a single sample. */
const MIN_SPAN = 10;

export function timeRange(
  first: number | null,
  last: number | null,
): [number | null, number | null] {
  if (first === null || last === null) return [null, null];
  return [Math.min(first, last - MIN_SPAN), last];
}

function axes(format: (value: number) => string): uPlot.Axis[] {
  const shared = {
    stroke: cssColor("--ink-soft"),
    grid: { stroke: cssColor("--line"), width: 1 },
    ticks: { show: false },
    font: "11px Geist Variable",
  };
  return [
    { ...shared, grid: { show: false }, space: 90, values: (_plot, at) => at.map(clockTime) },
    { ...shared, size: 56, space: 32, values: (_plot, ticks) => ticks.map((tick) => format(tick)) },
  ];
}

function options({ series, format, max }: ChartProps, width: number): uPlot.Options {
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false },
    padding: [8, 8, 0, 0],
    scales: {
      x: { range: (_plot, first, last) => timeRange(first, last) },
      y: { range: (_plot, _low, high) => [0, max ?? Math.max(high * 1.1, 1)] },
    },
    axes: axes(format),
    series: [
      {},
      ...series.map(({ name, color }) => ({
        label: name,
        stroke: cssColor(color),
        width: 1.5,
        points: { show: false },
      })),
    ],
  };
}

/** A small time series. Redrawn when the theme, the width or the set of series changes. */
export function Chart(props: ChartProps) {
  const { ref: measure, width } = useElementSize();
  const box = useRef<HTMLDivElement>(null);
  const { colorScheme } = useMantineColorScheme();
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const shape = `${colorScheme} ${props.series.map((each) => each.name).join()}`;
  // biome-ignore lint/correctness/useExhaustiveDependencies: `shape` is what forces a redraw
  useEffect(() => {
    if (width === 0 || !box.current) return;
    const made = new uPlot(options(latest.current, width), latest.current.data, box.current);
    plot.current = made;
    return () => made.destroy();
  }, [width, shape]);
  useEffect(() => plot.current?.setData(props.data), [props.data]);
  return (
    <div ref={measure} role="img" aria-label={props.label} style={{ height: HEIGHT }}>
      <div ref={box} />
    </div>
  );
}
