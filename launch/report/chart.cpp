#include "launch/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace shardrun {
namespace {

constexpr double kLeft = 62, kRight = 16, kTop = 14, kBottom = 40;

std::string superscript(int exponent) {
  static const char* const kDigits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string result;
  for (char c : std::to_string(exponent)) result += c == '-' ? "⁻" : kDigits[c - '0'];
  return result;
}

struct Tick {
  double at;  // on the scale
  std::string label;
};

// The vertical axis: values to places between `low` and `high` of the scale.
class Axis {
 public:
  Axis(AxisScale scale, double least, double most) : scale_(scale) {
    const bool spread = least > 0 && most / least > 50;
    if (scale_ == AxisScale::automatic) scale_ = spread ? AxisScale::automatic : AxisScale::linear;
    if (scale_ == AxisScale::log2 && least <= 0) scale_ = AxisScale::linear;
    if (scale_ == AxisScale::from_zero) {
      least = std::min(least, 0.0);
      most = std::max(most, 0.0);
    }
    low_ = on_scale(least);
    high_ = on_scale(most);
    const double size = std::max(std::abs(low_), std::abs(high_));
    if (high_ - low_ <= std::max(size * 1e-9, 1e-150)) {  // a constant stands in the middle
      const double room = is_log() ? 1 : size > 1e-140 ? size * 0.1 : 1;
      low_ -= room;
      high_ += room;
      return;
    }
    const double room = (high_ - low_) * 0.06;
    const bool keeps_zero = scale_ == AxisScale::from_zero;
    if (!keeps_zero || low_ < 0) low_ -= room;
    if (!keeps_zero || high_ > 0) high_ += room;
  }

  // 0 at the bottom, 1 at the top.
  double place(double value) const {
    return std::clamp((on_scale(value) - low_) / (high_ - low_), 0.0, 1.0);
  }
  double place_of(const Tick& tick) const { return (tick.at - low_) / (high_ - low_); }

  std::vector<Tick> ticks() const {
    std::vector<Tick> result;
    if (!is_log()) {
      for (double at : round_ticks(low_, high_, 5)) result.push_back({at, short_number(at)});
      return result;
    }
    const int base = scale_ == AxisScale::log2 ? 2 : 10;
    const int from = static_cast<int>(std::ceil(low_)), to = static_cast<int>(std::floor(high_));
    const int every = std::max(1, (to - from + 4) / 5);
    const bool plain = base == 10 && from >= -4 && to <= 4;
    for (int power = from; power <= to; power += every) {
      result.push_back(
          {static_cast<double>(power), plain ? short_number(std::pow(10.0, power))
                                             : std::to_string(base) + superscript(power)});
    }
    return result;
  }

 private:
  bool is_log() const { return scale_ == AxisScale::log2 || scale_ == AxisScale::automatic; }
  double on_scale(double value) const {
    if (scale_ == AxisScale::log2) return std::log2(value);
    return scale_ == AxisScale::automatic ? std::log10(value) : value;
  }

  AxisScale scale_;
  double low_, high_;
};

class Figure {
 public:
  Figure(const Chart& chart, Axis axis) : chart_(chart), axis_(axis) {}

  double x(double step) const {
    const double first = static_cast<double>(chart_.first_step);
    const double span = static_cast<double>(chart_.last_step) - first;
    const double place = span > 0 ? (step - first) / span : 0.5;
    return kLeft + place * (chart_.width - kLeft - kRight);
  }
  double y(double place) const {
    return chart_.height - kBottom - place * (chart_.height - kBottom - kTop);
  }

  std::string grid() const {
    std::string svg;
    const double right = chart_.width - kRight;
    for (const Tick& tick : axis_.ticks()) {
      const double at = y(axis_.place_of(tick));
      svg += fmt::format(
          "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>"
          "<text class=\"end\" x=\"{3}\" y=\"{4:.1f}\">{5}</text>\n",
          kLeft, right, at, kLeft - 8, at + 4, tick.label);
    }
    const double floor = y(0);
    svg += fmt::format("<line class=\"axis\" x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\"/>\n",
                       kLeft, right, floor);
    const auto first = static_cast<double>(chart_.first_step);
    const auto last = static_cast<double>(chart_.last_step);
    for (double step : round_ticks(first, last, std::max(2, chart_.width / 110))) {
      if (step != std::floor(step)) continue;
      svg += fmt::format(
          "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>"
          "<text class=\"middle\" x=\"{0:.1f}\" y=\"{3}\">{4}</text>\n",
          x(step), floor, floor + 4, floor + 18, short_number(step));
    }
    return svg + fmt::format("<text class=\"middle\" x=\"{}\" y=\"{}\">step</text>\n",
                             (kLeft + right) / 2, chart_.height - 6);
  }

  std::string curve(const Curve& curve) const {
    const auto& buckets = curve.series->buckets();
    const auto middle = [&](const Series::Bucket& b) {
      return x((static_cast<double>(b.first) + static_cast<double>(b.last)) / 2);
    };
    const auto point = [&](const Series::Bucket& b, double value) {
      return fmt::format("{:.1f},{:.1f} ", middle(b), y(axis_.place(value)));
    };
    std::string svg;
    if (curve.series->thinned()) {
      svg += fmt::format("<polygon class=\"band {}\" points=\"", curve.colour);
      for (const auto& bucket : buckets) svg += point(bucket, bucket.high);
      for (auto b = buckets.rbegin(); b != buckets.rend(); ++b) svg += point(*b, b->low);
      svg += "\"/>\n";
    }
    if (buckets.size() > 1) {
      svg += fmt::format("<polyline class=\"curve {}\" points=\"", curve.colour);
      for (const auto& bucket : buckets) svg += point(bucket, bucket.mean);
      svg += "\"/>\n";
    }
    if ((curve.dots && buckets.size() <= 64) || buckets.size() == 1) {
      for (const auto& b : buckets) {
        svg += fmt::format(
            "<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>step {}: "
            "{:.6g}</title></circle>\n",
            curve.colour, middle(b), y(axis_.place(b.mean)), b.last, b.mean);
      }
    }
    return svg;
  }

  std::string skips() const {
    std::string svg;
    for (const auto& b : chart_.skips->buckets()) {
      const std::string steps = b.first == b.last
                                    ? fmt::format("step {}", b.first)
                                    : fmt::format("{} of steps {} to {}", b.count, b.first, b.last);
      svg +=
          fmt::format("<path class=\"skip\" d=\"M{:.1f} {}v9\"><title>{} skipped</title></path>\n",
                      x(static_cast<double>(b.first)), kTop - 10, steps);
    }
    return svg;
  }

 private:
  const Chart& chart_;
  Axis axis_;
};

}  // namespace

std::vector<double> round_ticks(double low, double high, int wanted) {
  if (!(high > low)) return {low};
  const double rough = (high - low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double times = rough / power;
  const double every = power * (times <= 1 ? 1 : times <= 2 ? 2 : times <= 5 ? 5 : 10);
  std::vector<double> ticks;
  const double first = std::ceil(low / every);
  for (int i = 0; i < 2 * wanted + 2; ++i) {
    const double at = (first + i) * every;
    if (!(at <= high)) break;
    ticks.push_back(at);
  }
  return ticks;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size >= 1e12) return fmt::format("{:.3g}", value);
  if (size >= 1e9) return fmt::format("{:.6g}G", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.6g}M", value / 1e6);
  if (size >= 1e3) return fmt::format("{:.6g}k", value / 1e3);
  return fmt::format("{:.6g}", value);
}

std::string html_escaped(std::string_view text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string chart_html(const Chart& chart) {
  double least = HUGE_VAL, most = -HUGE_VAL;
  std::string legend;
  const bool marks = chart.skips && !chart.skips->buckets().empty();
  for (const Curve& curve : chart.curves) {
    if (curve.series->buckets().empty()) continue;
    for (const auto& bucket : curve.series->buckets()) {
      least = std::min(least, bucket.low);
      most = std::max(most, bucket.high);
    }
    if (chart.curves.size() > 1 || marks) {
      legend += fmt::format("<span><i class=\"{}\"></i>{}</span>", curve.colour,
                            html_escaped(curve.name));
    }
  }
  if (marks) legend += "<span><i class=\"skip\"></i>skipped step</span>";
  std::string html = fmt::format("<figure><figcaption><b>{}</b>{}</figcaption>\n",
                                 html_escaped(chart.title), legend);
  if (least > most) return html + "<p class=\"none\">Nothing was measured.</p></figure>\n";
  const Figure figure(chart, Axis(chart.scale, least, most));
  html += fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} over steps\">\n",
                      chart.width, chart.height, html_escaped(chart.title));
  html += figure.grid();
  for (const Curve& curve : chart.curves) {
    if (!curve.series->buckets().empty()) html += figure.curve(curve);
  }
  if (marks) html += figure.skips();
  return html + "</svg></figure>\n";
}

}  // namespace shardrun
