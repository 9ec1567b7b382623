// Curves over steps as one figure of HTML: a caption with a legend, and an inline SVG. Colours are
// CSS classes of the page (report.cpp), so that they follow light and dark.
#pragma once

#include <string>
#include <vector>

#include "launch/report/history.h"

namespace shardrun {

enum class AxisScale {
  linear,     // from the lowest to the highest value
  from_zero,  // linear, zero included
  log2,
  automatic,  // log10 where all values are positive and span more than a factor of 50, else linear
};

struct Curve {
  const Series* series;
  std::string name;    // in the legend
  std::string colour;  // a CSS class
  bool dots = false;   // marks each point: for curves with few
};

struct Chart {
  std::string title;
  std::vector<Curve> curves;
  AxisScale scale = AxisScale::linear;
  int64_t first_step, last_step;
  const Series* skips = nullptr;  // steps marked along the upper edge
  int width = 540, height = 240;
};

std::string chart_html(const Chart& chart);

std::string html_escaped(std::string_view text);

// "12.5k", "0.001", "3.2M".
std::string short_number(double value);

// Places of about `wanted` round numbers in [low, high]; at most 2 * wanted + 2.
std::vector<double> round_ticks(double low, double high, int wanted);

}  // namespace shardrun
